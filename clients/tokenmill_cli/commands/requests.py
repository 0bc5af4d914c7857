"""`tokenmill requests`: watch, cancel and prioritise requests while they run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import click
from tokenmill_client import AlreadyEnded, Client, NotFound, RequestFilter, RequestInfo
from tokenmill_client.admin_records import CancelOutcome

from tokenmill_cli.app import App, console, pass_app, server_options
from tokenmill_cli.commands.actions import action_table
from tokenmill_cli.exits import CommandError, ExitCode
from tokenmill_cli.filters import filter_options, request_filter
from tokenmill_cli.output import facts, print_json, show, table
from tokenmill_cli.views import choice_table, request_facts, request_table, transition_table
from tokenmill_cli.watching import Listing, interval_option, watch_one
from tokenmill_cli.watching import watch as watch_listing


@click.group()
def requests() -> None:
    """Watch, cancel and prioritise requests."""


@requests.command("list")
@filter_options
@click.option(
    "--sort", type=click.Choice(["newest", "oldest", "priority"]), default="newest", show_default=True,
    help="priority: the highest first, the oldest of equals first.",
)  # fmt: skip
@click.option("--limit", type=click.IntRange(min=0), default=50, show_default=True, help="Most to show; 0 for all.")
@click.option("--watch", "watching", is_flag=True, help="Show it again and again until Ctrl-C; into a pipe, each change.")
@interval_option
@server_options
@pass_app
def list_(app: App, sort: str, limit: int, watching: bool, interval: float, **conditions: Any) -> None:
    """Requests, newest first."""
    listing = Listing(request_filter(**conditions), sort != "newest", sort == "priority", limit or None)
    with app.client() as client:
        if watching:
            watch_listing(app, client, listing, interval)
        infos = listing.read(client)
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
    """One request with its whole life, and why it waits.

    Of several choices, those that are given out: of --best-of the best, once all have ended.
    """
    with app.client() as client:
        life = client.admin.get_request(request_id)
        actions = list(client.admin.list_actions(request_id))
        snapshot = client.get_request(request_id, include_output=with_text)
    if app.json:
        extra = {"output_text": snapshot.output_text} if with_text else {}
        print_json({"info": life.info, "transitions": life.transitions, "actions": actions, "choices": snapshot.choices, **extra})
        return
    screen = console()
    show(screen, facts(request_facts(life.info)))
    click.echo()
    show(screen, transition_table(life))
    if actions:
        click.echo()
        show(screen, action_table(actions))
    if snapshot.choices:
        click.echo()
        show(screen, choice_table(snapshot))
    if with_text:
        for choice in snapshot.choices:
            click.echo(f"\n[{choice.choice}] {choice.output_text}")
        if not snapshot.choices:
            click.echo(f"\n{snapshot.output_text}")


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
@click.argument("words", nargs=-1, metavar="[REQUEST_ID] [PRIORITY]")
@filter_options
@click.option("--deadline-in", type=click.FloatRange(min=0), metavar="SECONDS", help="Set the deadline so long from now.")
@click.option("--reason", default="", help="Kept in the record of actions.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@server_options
@pass_app
def prioritize(app: App, words: tuple[str, ...], deadline_in: float | None, reason: str, yes: bool, **conditions: Any) -> None:
    """Give a request, or all unfinished ones that meet the conditions, another priority (higher runs sooner) or deadline."""
    condition = request_filter(**conditions)
    by_id = condition == RequestFilter()
    if by_id and not words:
        raise click.UsageError("Give either a request id or conditions, such as --tenant or --lane.")
    priority = _read_priority(words[1:] if by_id else words)
    if priority is None and deadline_in is None:
        raise click.UsageError("Give a priority, or --deadline-in.")
    deadline = None if deadline_in is None else datetime.now(UTC) + timedelta(seconds=deadline_in)
    with app.client() as client:
        update = partial(client.admin.update_request, priority=priority, deadline=deadline, reason=reason)
        infos = [update(words[0])] if by_id else _update_all(update, _confirmed(client, condition, yes))
        if priority is not None:
            _say_when_unheeded(client)
    if app.json:
        print_json(infos[0] if by_id else infos)
    elif by_id:
        show(console(), facts(request_facts(infos[0])))
    else:
        show(console(), request_table(infos))


def _read_priority(words: Sequence[str]) -> int | None:
    if len(words) > 1:
        raise click.UsageError(f"One priority is enough: {' '.join(words)}")
    try:
        return int(words[0]) if words else None
    except ValueError:
        raise click.UsageError(f"A priority is a whole number, not {words[0]}.") from None


def _confirmed(client: Client, condition: RequestFilter, yes: bool) -> list[str]:
    """The ids of those that meet the condition now and have not ended, once their number is confirmed."""
    request_ids = [info.request_id for info in Listing(condition).unfinished().read(client)]
    if request_ids and not yes:
        click.confirm(f"Change {len(request_ids)} request{'s' * (len(request_ids) != 1)}?", abort=True, err=True)
    return request_ids


def _update_all(update: Callable[[str], RequestInfo], request_ids: Sequence[str]) -> list[RequestInfo]:
    """Those that have ended since they were counted keep none of the others from being changed."""
    infos = []
    for request_id in request_ids:
        with suppress(AlreadyEnded, NotFound):
            infos.append(update(request_id))
    if ended := len(request_ids) - len(infos):
        click.echo(f"{ended} of {len(request_ids)} had ended before they were changed.", err=True)
    return infos


def _say_when_unheeded(client: Client) -> None:
    now = client.admin.get_policy()
    if now.policy != "priority":
        click.echo(f"Policy {now.policy} orders the queue without priorities: see `tokenmill policy set priority`.", err=True)


@requests.command("retry")
@click.argument("request_id")
@click.option("--reason", default="", help="Kept in the record of actions.")
@server_options
@pass_app
def retry(app: App, request_id: str, reason: str) -> None:
    """Submit a failed request again, as a new one that runs detached; prints its id."""
    with app.client() as client:
        new_id = client.admin.retry_request(request_id, reason=reason)
    if app.json:
        print_json({"request_id": new_id, "retry_of": request_id})
    else:
        click.echo(new_id)


@requests.command("watch")
@click.argument("request_id", required=False)
@filter_options
@interval_option
@server_options
@pass_app
def watch(app: App, request_id: str | None, interval: float, **conditions: Any) -> None:
    """Follow one request to its end, or all unfinished ones until Ctrl-C.

    On a terminal the table stays in place; into a pipe, and with --json, each change is a line.
    """
    with app.client() as client:
        if request_id is not None:
            watch_one(app, client, request_id, interval)
        else:
            watch_listing(app, client, Listing(request_filter(**conditions)).unfinished(), interval)
