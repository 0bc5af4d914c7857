"""Requests as a table, and followed while they run."""

from __future__ import annotations

import time
from collections.abc import Sequence

import click
from rich.console import Group
from rich.live import Live
from rich.table import Table
from tokenmill_client import Client, RequestFilter, RequestInfo, RequestState

from tokenmill_cli.app import App, console
from tokenmill_cli.output import age, local_time, print_json_line, table

_COLUMNS = ("REQUEST", "STATE", "PRIO", "TOKENS", "AGE", "TENANT")
_UNFINISHED = tuple(state for state in RequestState if not state.ended)


def request_table(infos: Sequence[RequestInfo]) -> Table:
    rows = [
        (
            info.request_id,
            info.state,
            info.priority,
            f"{info.usage.prompt_tokens}+{info.usage.output_tokens}",
            age(info.submitted_at),
            info.tenant,
        )
        for info in infos
    ]
    return table(_COLUMNS, rows, right=("PRIO", "TOKENS", "AGE"))


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


def watch_lines(app: App, client: Client, condition: RequestFilter, interval_s: float) -> None:
    last: dict[str, RequestInfo] = {}
    while True:
        infos = _unfinished(client, condition)
        now = {info.request_id: info for info in infos}
        gone = [_found(client, request_id) for request_id in last.keys() - now.keys()]
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


def watch_table(client: Client, condition: RequestFilter, interval_s: float) -> None:
    with Live(console=console(), auto_refresh=False, screen=False) as live:
        while True:
            infos, load = _unfinished(client, condition), client.admin.get_load()
            head = f"{load.num_requests_running} running, {load.num_requests_waiting} waiting, KV {load.kv_cache_usage:.0%}"
            rows = max(1, live.console.height - 4)
            more = f"… and {len(infos) - rows} more" if len(infos) > rows else ""
            live.update(Group(head, request_table(infos[:rows]), more), refresh=True)
            time.sleep(interval_s)


def _unfinished(client: Client, condition: RequestFilter) -> list[RequestInfo]:
    if not condition.states:
        condition = RequestFilter(_UNFINISHED, condition.tenant, condition.min_priority, condition.max_priority, condition.model)
    return list(client.admin.list_requests(condition, oldest_first=True, page_size=1_000))
