"""`tokenmill executors`."""

from __future__ import annotations

import click
from tokenmill_client.admin_records import Executor

from tokenmill_cli.app import App, console, pass_app, server_options
from tokenmill_cli.output import facts, print_json, show


@click.group()
def executors() -> None:
    """See what runs the models, and take work off it."""


@executors.command("list")
@server_options
@pass_app
def list_(app: App) -> None:
    """Every executor the scheduler knows."""
    with app.client() as client:
        known = client.admin.list_executors()
    if app.json:
        print_json(known)
        return
    screen = console()
    if not known:
        screen.print("No executor yet.")
    for executor in known:
        show(screen, facts(_facts(executor)))


def _facts(executor: Executor) -> list[tuple[str, object]]:
    return [
        ("name", executor.name),
        ("address", executor.address),
        ("model", executor.model),
        ("device", executor.device),
        ("connected", f"yes, epoch {executor.epoch}" if executor.connected else "no"),
        ("drained", "yes" if executor.draining else ""),
        *(_work(executor) if executor.total_blocks else ()),
    ]


def _work(executor: Executor) -> list[tuple[str, object]]:
    """Of one that has joined since the scheduler started."""
    counts = f"{executor.held_blocks} held, {executor.cached_blocks} cached, {executor.free_blocks} free"
    return [
        ("running", executor.running),
        ("blocks", f"{counts} of {executor.total_blocks}, {executor.block_size} tokens each"),
        ("steps", executor.steps),
        ("idle", f"{executor.idle_share:.1%} of the time that work waited"),
    ]


_reason_option = click.option("--reason", default="", help="Shown to those who wait, and kept in the record of actions.")


@executors.command("drain")
@click.argument("name")
@_reason_option
@server_options
@pass_app
def drain(app: App, name: str, reason: str) -> None:
    """Move the work off an executor and give it none until `undrain`, also across restarts.

    What runs on it goes on elsewhere, or waits; nothing fails.
    """
    with app.client() as client:
        _show(app, client.admin.drain_executor(name, reason=reason))


@executors.command("undrain")
@click.argument("name")
@_reason_option
@server_options
@pass_app
def undrain(app: App, name: str, reason: str) -> None:
    """Give an executor work again."""
    with app.client() as client:
        _show(app, client.admin.undrain_executor(name, reason=reason))


def _show(app: App, executor: Executor) -> None:
    if app.json:
        print_json(executor)
    else:
        show(console(), facts(_facts(executor)))
