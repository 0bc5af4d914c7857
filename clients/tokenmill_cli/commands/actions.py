"""`tokenmill actions`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import click
from rich.table import Table
from tokenmill_client.admin_records import Action

from tokenmill_cli.app import App, console, pass_app, server_options
from tokenmill_cli.output import local_time, print_json, show, table


@click.group()
def actions() -> None:
    """See what operators did."""


@actions.command("list")
@click.option("--target", default="", metavar="NAME", help="To this request or executor.")
@click.option("--limit", type=click.IntRange(min=0), default=50, show_default=True, help="Most to show; 0 for all.")
@server_options
@pass_app
def list_(app: App, target: str, limit: int) -> None:
    """Who did what, when and why, newest first."""
    with app.client() as client:
        done = list(islice(client.admin.list_actions(target), limit or None))
    if app.json:
        print_json(done)
    else:
        show(console(), action_table(done))


def action_table(done: Sequence[Action]) -> Table:
    rows = [
        (local_time(action.at), action.actor, action.verb, action.target, "; ".join(filter(None, (action.detail, action.reason))))
        for action in done
    ]
    return table(("TIME", "WHO", "ACTION", "ON", "DETAIL AND REASON"), rows)
