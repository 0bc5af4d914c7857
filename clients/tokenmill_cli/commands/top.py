"""`tokenmill top`."""

from __future__ import annotations

import sys
import time
from datetime import UTC, datetime
from itertools import islice

import click
from rich.console import Console
from rich.live import Live
from tokenmill_client import Client, Lane, RequestFilter, RequestState

from tokenmill_cli.app import App, pass_app, server_options
from tokenmill_cli.output import print_json_line
from tokenmill_cli.top.frame import frame
from tokenmill_cli.top.history import History, Look
from tokenmill_cli.top.keys import keys_of
from tokenmill_cli.top.view import View
from tokenmill_cli.top.watch import watch
from tokenmill_cli.watching import interval_option

_UNFINISHED = tuple(state for state in RequestState if not state.ended)
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

    Lanes, batch occupancy, KV blocks, latencies, the slowest requests. Keys: q quits, ? tells the others. With --json, one document
    for each look.
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
    """Until a key or Ctrl-C ends it."""
    with keys_of(sys.stdin) as keys, Live(console=screen, auto_refresh=False, screen=True) as live:

        def draw(history: History, view: View, trouble: str) -> None:
            now = datetime.now().astimezone()
            live.update(frame(history, app.server, screen.width, screen.height - 1, now, view, trouble), refresh=True)

        watch(lambda lane: _look(client, lane), draw, keys, View(interval_s), time.monotonic)


def _look(client: Client, lane: Lane | None = None) -> Look:
    admin, condition = client.admin, RequestFilter(_UNFINISHED, lanes=() if lane is None else (lane,))
    oldest = islice(admin.list_requests(condition, oldest_first=True, page_size=_MOST_REQUESTS), _MOST_REQUESTS)
    return Look(time.monotonic(), admin.get_load(), admin.list_executors(), tuple(oldest))
