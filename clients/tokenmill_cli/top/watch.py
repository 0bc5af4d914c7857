"""Looks again and again, draws, and does what keys say, until one ends it. Must not know: servers, terminals, how it is drawn."""

from __future__ import annotations

from collections.abc import Callable

from tokenmill_client import Lane, Unavailable

from tokenmill_cli.top.history import History, Look
from tokenmill_cli.top.keys import Keys
from tokenmill_cli.top.view import View

# Between two draws of what is paused: a window may change its size.
_PAUSED_S = 5.0


def watch(
    look: Callable[[Lane | None], Look],
    draw: Callable[[History, View, str], None],
    keys: Keys,
    view: View,
    clock: Callable[[], float],
) -> None:
    """`look` has the slowest requests of one lane, or of all. A scheduler that goes away is waited for, but for the first look.

    Raises Unavailable, and whatever else `look` raises.
    """
    history, trouble = History(), ""
    history.add(look(view.lane))
    due_s = clock() + view.interval_s
    while True:
        draw(history, view, trouble)
        key = keys.wait(_PAUSED_S if view.paused else due_s - clock())
        before, view = view, view if key is None else view.pressed(key)
        if view.quits:
            return
        if view.lane is not before.lane or view.paused is not before.paused:
            due_s = clock()
        due_s = min(due_s, clock() + view.interval_s)
        if view.paused or clock() < due_s:
            continue
        try:
            history.add(look(view.lane))
            trouble = ""
        except Unavailable as error:
            trouble = f"no answer: {error}"
        due_s = clock() + view.interval_s
