"""`tokenmill requests`: watch, cancel and prioritise requests while they run."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Any

import click
from rich.table import Table
from tokenmill_client import Client, RequestFilter, RequestInfo
from tokenmill_client.records import CancelOutcome, RequestLife

from tokenmill_cli.app import App, console, pass_app, server_options
from tokenmill_cli.exits import CommandError, ExitCode
from tokenmill_cli.filters import filter_options, request_filter
from tokenmill_cli.output import facts, local_time, print_json, show, table
from tokenmill_cli.watching import request_table, watch_lines, watch_one, watch_table


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
        show(console(), request_table(infos))


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
            watch_one(app, client, request_id, interval)
        elif app.json or not console().is_terminal:
            watch_lines(app, client, request_filter(**conditions), interval)
        else:
            watch_table(client, request_filter(**conditions), interval)
