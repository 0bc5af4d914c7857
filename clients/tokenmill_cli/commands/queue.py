"""`tokenmill queue`: stop admissions for a while."""

from __future__ import annotations

import click

from tokenmill_cli.app import App, console, pass_app, server_options
from tokenmill_cli.output import facts, print_json, show, show_change

_reason_option = click.option("--reason", default="", help="Shown to those who wait, and kept in the record of actions.")


@click.group()
def queue() -> None:
    """Pause and resume the queue."""


@queue.command("pause")
@_reason_option
@server_options
@pass_app
def pause(app: App, reason: str) -> None:
    """Admit no waiting request until `resume`, also across restarts.

    New requests are accepted and wait; those that have run already go on.
    """
    with app.client() as client:
        changed = client.admin.pause_queue(reason=reason)
    show_change(app.json, changed, "The queue is paused.", "The queue was paused already.")


@queue.command("resume")
@_reason_option
@server_options
@pass_app
def resume(app: App, reason: str) -> None:
    """Admit waiting requests again."""
    with app.client() as client:
        changed = client.admin.resume_queue(reason=reason)
    show_change(app.json, changed, "The queue goes on.", "The queue was not paused.")


@queue.command("status")
@server_options
@pass_app
def status(app: App) -> None:
    """Whether the queue is paused, by whom and why, and how many wait."""
    with app.client() as client:
        load = client.admin.get_load()
    if app.json:
        names = ("queue_paused", "queue_pause_reason", "num_requests_running", "num_requests_waiting")
        print_json({name: getattr(load, name) for name in names})
        return
    paused = f"paused {load.queue_pause_reason}" if load.queue_paused else "open"
    show(
        console(),
        facts([("queue", paused), ("waiting", load.num_requests_waiting), ("running", load.num_requests_running)]),
    )
