"""`tokenmill top`."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from itertools import islice

import click
from rich.console import Console, RenderableType
from rich.live import Live
from tokenmill_client import Client, RequestFilter, RequestState, Unavailable

from tokenmill_cli.app import App, pass_app, server_options
from tokenmill_cli.output import print_json_line
from tokenmill_cli.top.frame import frame
from tokenmill_cli.top.history import History, Look
from tokenmill_cli.watching import interval_option

_UNFINISHED = RequestFilter(states=tuple(state for state in RequestState if not state.ended))
_MOST_REQUESTS = 50
# Of a frame that goes into a pipe or a file.
_PLAIN_SIZE = (120, 40)


@click.command()
@interval_option
@click.option("--once", is_flag=True, help="One frame, and that is it; the same into a pipe.")
@server_options
@pass_app
def top(app: App, interval: float, once: bool) -> None:
    """Watch a scheduler at work, live.

    Lanes, batch occupancy, KV blocks, latencies, the slowest requests. Ctrl-C ends it. With --json, one document for each look.
    """
    screen = Console(highlight=False)
    with app.client() as client:
        if app.json:
            _print_looks(client, interval, once)
        elif once or not screen.is_terminal:
            _print_frame(app, client, screen, interval)
        else:
            _watch(app, client, screen, interval)


def _print_looks(client: Client, interval_s: float, once: bool) -> None:
    while True:
        look = _look(client)
        print_json_line({"load": look.load, "executors": look.executors, "oldest": look.oldest})
        if once:
            return
        time.sleep(interval_s)


def _print_frame(app: App, client: Client, screen: Console, interval_s: float) -> None:
    """Of two looks, so that there are rates."""
    if not screen.is_terminal:
        screen = Console(highlight=False, width=_PLAIN_SIZE[0])
    history = History()
    history.add(_look(client))
    time.sleep(interval_s)
    history.add(_look(client))
    screen.print(frame(history, app.server, screen.width, _PLAIN_SIZE[1], datetime.now(UTC)))


def _watch(app: App, client: Client, screen: Console, interval_s: float) -> None:
    """Until interrupted. A scheduler that goes away is waited for."""
    history = History()
    history.add(_look(client))
    trouble = ""

    def drawn() -> RenderableType:
        return frame(history, app.server, screen.width, screen.height - 1, datetime.now().astimezone(), trouble)

    with Live(drawn(), console=screen, auto_refresh=False, screen=True) as live:
        while True:
            time.sleep(interval_s)
            try:
                history.add(_look(client))
                trouble = ""
            except Unavailable as error:
                trouble = f"no answer: {error}"
            live.update(drawn(), refresh=True)


def _look(client: Client) -> Look:
    admin = client.admin
    oldest = islice(admin.list_requests(_UNFINISHED, oldest_first=True, page_size=_MOST_REQUESTS), _MOST_REQUESTS)
    return Look(time.monotonic(), admin.get_load(), admin.list_executors(), tuple(oldest))
