"""Requests followed while they run."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from itertools import islice

import click
from rich.console import Group
from rich.live import Live
from tokenmill_client import Client, RequestFilter, RequestInfo, RequestState

from tokenmill_cli.app import App, console
from tokenmill_cli.output import local_time, print_json_line
from tokenmill_cli.views import request_table

_PAGE_SIZE = 1_000
_UNFINISHED = tuple(state for state in RequestState if not state.ended)


interval_option = click.option(
    "--interval", type=click.FloatRange(min=0.05), default=1.0, show_default=True, metavar="SECONDS", help="Between two looks."
)


def watch_one(app: App, client: Client, request_id: str, interval_s: float) -> None:
    """Each move between states once, with its reason."""
    shown = 0
    while True:
        life = client.admin.get_request(request_id)
        for move in life.transitions[shown:]:
            if app.json:
                print_json_line(move)
            else:
                click.echo(f"{local_time(move.at)}  {move.after:<9}  {move.reason}".rstrip())
        shown = len(life.transitions)
        if life.info.state.ended:
            return
        time.sleep(interval_s)


@dataclass(frozen=True, slots=True)
class Listing:
    """Which requests, in which order, and how many at most (None: all)."""

    condition: RequestFilter
    oldest_first: bool = True
    by_priority: bool = False
    limit: int | None = None

    def read(self, client: Client) -> list[RequestInfo]:
        page_size = min(self.limit or _PAGE_SIZE, _PAGE_SIZE)
        found = client.admin.list_requests(
            self.condition, oldest_first=self.oldest_first, by_priority=self.by_priority, page_size=page_size
        )
        return list(islice(found, self.limit))

    def unfinished(self) -> Listing:
        """The same without those that have ended, unless it names states itself."""
        return self if self.condition.states else replace(self, condition=replace(self.condition, states=_UNFINISHED))


def watch(app: App, client: Client, listing: Listing, interval_s: float) -> None:
    """Until interrupted: on a terminal a table that stays in place, into a pipe and as JSON a line for each change."""
    if app.json or not console().is_terminal:
        _watch_lines(app, client, listing, interval_s)
    else:
        _watch_table(client, listing, interval_s)


def _watch_lines(app: App, client: Client, listing: Listing, interval_s: float) -> None:
    last: dict[str, RequestInfo] = {}
    while True:
        infos = listing.read(client)
        now = {info.request_id: info for info in infos}
        gone = [_found(client, request_id) for request_id in last if request_id not in now]
        for info in [*gone, *infos]:
            before = last.get(info.request_id)
            if before is None or (before.state, before.priority) != (info.state, info.priority):
                _line(app, info)
        last = now
        time.sleep(interval_s)


def _found(client: Client, request_id: str) -> RequestInfo:
    return client.admin.get_request(request_id).info


def _line(app: App, info: RequestInfo) -> None:
    if app.json:
        print_json_line(info)
    else:
        tokens = f"{info.usage.prompt_tokens}+{info.usage.output_tokens}"
        click.echo(f"{info.request_id}  {info.state:<9}  priority {info.priority}  {tokens} tokens  {info.wait_reason}".rstrip())


def _watch_table(client: Client, listing: Listing, interval_s: float) -> None:
    with Live(console=console(), auto_refresh=False, screen=False) as live:
        while True:
            infos, load = listing.read(client), client.admin.get_load()
            head = f"{load.num_requests_running} running, {load.num_requests_waiting} waiting, KV {load.kv_cache_usage:.0%}"
            head += f", queue paused {load.queue_pause_reason}" if load.queue_paused else ""
            rows = max(1, live.console.height - 4)
            more = f"… and {len(infos) - rows} more" if len(infos) > rows else ""
            live.update(Group(head, request_table(infos[:rows]), more), refresh=True)
            time.sleep(interval_s)
