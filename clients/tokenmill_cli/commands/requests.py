"""`tokenmill requests`: watch, cancel and prioritise requests while they run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Any

import click
from rich.console import Group
from rich.live import Live
from rich.table import Table
from tokenmill_client import Client, RequestFilter, RequestInfo, RequestState
from tokenmill_client.records import CancelOutcome, RequestLife

from tokenmill_cli.app import App, console, pass_app, server_options
from tokenmill_cli.exits import CommandError, ExitCode
from tokenmill_cli.filters import filter_options, request_filter
from tokenmill_cli.output import age, facts, local_time, print_json, print_json_line, show, table

_COLUMNS = ("REQUEST", "STATE", "PRIO", "TOKENS", "AGE", "TENANT")
_UNFINISHED = tuple(state for state in RequestState if not state.ended)


@click.group()
def requests() -> None:
    """Watch, cancel and prioritise requests."""


@requests.command("list")
@filter_options
@click.option("--oldest-first", is_flag=True, help="Newest first unless given.")
@click.option("--limit", type=click.IntRange(min=0), default=50, show_default=True, help="Most to show; 0 for all.")
@server_options
@pass_app
def list_(app: App, oldest_first: bool, limit: int, **conditions: Any) -> None:
    """Requests, newest first."""
    with app.client() as client:
        found = client.admin.list_requests(
            request_filter(**conditions), oldest_first=oldest_first, page_size=min(limit or 1_000, 1_000)
        )
        infos = list(islice(found, limit or None))
    if app.json:
        print_json(infos)
    else:
        show(console(), _table(infos))


def _table(infos: Sequence[RequestInfo]) -> Table:
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


@requests.command("get")
@click.argument("request_id")
@click.option("--text", "with_text", is_flag=True, help="Show its output so far, too.")
@server_options
@pass_app
def get(app: App, request_id: str, with_text: bool) -> None:
    """One request with its whole life, and why it waits."""
    with app.client() as client:
        life = client.admin.get_request(request_id)
        text = client.get_request(request_id, include_output=True).output_text if with_text else None
    if app.json:
        extra = {} if text is None else {"output_text": text}
        print_json({"info": life.info, "transitions": life.transitions, **extra})
        return
    screen = console()
    show(screen, facts(_facts(life.info)))
    click.echo()
    show(screen, _transitions(life))
    if text is not None:
        click.echo(f"\n{text}")


def _facts(info: RequestInfo) -> list[tuple[str, object]]:
    return [
        ("request", info.request_id),
        ("model", info.model),
        ("tenant", info.tenant),
        ("state", info.state),
        ("finish reason", info.finish_reason),
        ("error", info.error),
        ("waits because", info.wait_reason),
        ("executor", info.executor),
        ("priority", info.priority),
        ("tokens", f"{info.usage.prompt_tokens} prompt, {info.usage.output_tokens} output"),
        ("preemptions", info.preemptions),
        ("detached", "yes" if info.detached else "no"),
        ("submitted", local_time(info.submitted_at)),
        ("first token", local_time(info.first_token_at)),
        ("finished", local_time(info.finished_at)),
        ("deadline", local_time(info.deadline)),
    ]


def _transitions(life: RequestLife) -> Table:
    """Times as seconds since the first."""
    start = life.transitions[0].at if life.transitions else None
    rows = [
        (f"+{(move.at - start).total_seconds():.3f} s", move.after, move.reason) for move in life.transitions if start is not None
    ]
    return table(("TIME", "STATE", "REASON"), rows, right=("TIME",))


@requests.command("cancel")
@click.argument("request_ids", nargs=-1)
@filter_options
@click.option("--reason", default="", help="Kept in the request's record.")
@click.option("--dry-run", is_flag=True, help="Show what would be cancelled, and change nothing.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@server_options
@pass_app
def cancel(app: App, request_ids: tuple[str, ...], reason: str, dry_run: bool, yes: bool, **conditions: Any) -> None:
    """Cancel requests by id, or all that meet the conditions."""
    condition = request_filter(**conditions)
    if bool(request_ids) == (condition != RequestFilter()):
        raise click.UsageError("Give either request ids or conditions, such as --tenant or --state.")
    with app.client() as client:
        outcomes = _cancel(client, request_ids, None if request_ids else condition, reason, dry_run, yes)
    if app.json:
        print_json(outcomes)
    else:
        _show_outcomes(outcomes, dry_run)
    missing = sum(outcome.not_found for outcome in outcomes)
    if missing:
        raise CommandError(f"{missing} of {len(outcomes)} request ids are not known: see `requests list`.", ExitCode.NOT_FOUND)


def _cancel(
    client: Client, request_ids: Sequence[str], condition: RequestFilter | None, reason: str, dry_run: bool, yes: bool
) -> tuple[CancelOutcome, ...]:
    """What a filter names is counted and confirmed first; then those very requests are cancelled, and none that came since."""
    if condition is not None:
        matching = client.admin.cancel_requests(condition=condition, dry_run=True)
        live = [outcome.request_id for outcome in matching if not outcome.already_ended]
        if dry_run or not live:
            return matching
        if not yes:
            click.confirm(f"Cancel {len(live)} request{'s' * (len(live) != 1)}?", abort=True, err=True)
        request_ids = live
    return tuple(
        outcome
        for start in range(0, len(request_ids), 1_000)
        for outcome in client.admin.cancel_requests(request_ids[start : start + 1_000], reason=reason, dry_run=dry_run)
    )


def _show_outcomes(outcomes: Sequence[CancelOutcome], dry_run: bool) -> None:
    rows = [(outcome.request_id, _outcome_text(outcome, dry_run)) for outcome in outcomes]
    if rows:
        show(console(), table(("REQUEST", "OUTCOME"), rows))
    else:
        click.echo("No request meets the conditions.")


def _outcome_text(outcome: CancelOutcome, dry_run: bool) -> str:
    if outcome.not_found:
        return "not found"
    if outcome.already_ended:
        return f"already {outcome.state}"
    return f"would be cancelled (now {outcome.state})" if dry_run else "cancelled"


@requests.command("prioritize", context_settings={"ignore_unknown_options": True})
@click.argument("request_id")
@click.argument("priority", type=int, required=False)
@click.option("--deadline-in", type=click.FloatRange(min=0), metavar="SECONDS", help="Set the deadline so long from now.")
@server_options
@pass_app
def prioritize(app: App, request_id: str, priority: int | None, deadline_in: float | None) -> None:
    """Give a waiting or running request another priority (higher runs sooner), or another deadline."""
    if priority is None and deadline_in is None:
        raise click.UsageError("Give a priority, or --deadline-in.")
    deadline = None if deadline_in is None else datetime.now(UTC) + timedelta(seconds=deadline_in)
    with app.client() as client:
        info = client.admin.update_request(request_id, priority=priority, deadline=deadline)
    if app.json:
        print_json(info)
    else:
        show(console(), facts(_facts(info)))


@requests.command("watch")
@click.argument("request_id", required=False)
@filter_options
@click.option("--interval", type=click.FloatRange(min=0.05), default=1.0, show_default=True, metavar="SECONDS")
@server_options
@pass_app
def watch(app: App, request_id: str | None, interval: float, **conditions: Any) -> None:
    """Follow one request to its end, or all unfinished ones until Ctrl-C.

    On a terminal the table stays in place; into a pipe, and with --json, each change is a line.
    """
    with app.client() as client:
        if request_id is not None:
            _watch_one(app, client, request_id, interval)
        elif app.json or not console().is_terminal:
            _watch_lines(app, client, request_filter(**conditions), interval)
        else:
            _watch_table(client, request_filter(**conditions), interval)


def _watch_one(app: App, client: Client, request_id: str, interval_s: float) -> None:
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


def _watch_lines(app: App, client: Client, condition: RequestFilter, interval_s: float) -> None:
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


def _watch_table(client: Client, condition: RequestFilter, interval_s: float) -> None:
    with Live(console=console(), auto_refresh=False, screen=False) as live:
        while True:
            infos, load = _unfinished(client, condition), client.admin.get_load()
            head = f"{load.num_requests_running} running, {load.num_requests_waiting} waiting, KV {load.kv_cache_usage:.0%}"
            rows = max(1, live.console.height - 4)
            more = f"… and {len(infos) - rows} more" if len(infos) > rows else ""
            live.update(Group(head, _table(infos[:rows]), more), refresh=True)
            time.sleep(interval_s)


def _unfinished(client: Client, condition: RequestFilter) -> list[RequestInfo]:
    if not condition.states:
        condition = RequestFilter(_UNFINISHED, condition.tenant, condition.min_priority, condition.max_priority, condition.model)
    return list(client.admin.list_requests(condition, oldest_first=True, page_size=1_000))
