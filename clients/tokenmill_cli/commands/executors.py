"""`tokenmill executors`."""

from __future__ import annotations

import click

from tokenmill_cli.app import App, console, pass_app, server_options
from tokenmill_cli.output import facts, print_json, show


@click.group()
def executors() -> None:
    """See what runs the models."""


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
        counts = f"{executor.held_blocks} held, {executor.cached_blocks} cached, {executor.free_blocks} free"
        lines: list[tuple[str, object]] = [
            ("name", executor.name),
            ("address", executor.address),
            ("model", executor.model),
            ("device", executor.device),
            ("connected", f"yes, epoch {executor.epoch}" if executor.connected else "no"),
            ("running", executor.running),
            ("blocks", f"{counts} of {executor.total_blocks}, {executor.block_size} tokens each"),
            ("steps", executor.steps),
            ("idle", f"{executor.idle_share:.1%} of the time that work waited"),
        ]
        show(screen, facts(lines))
