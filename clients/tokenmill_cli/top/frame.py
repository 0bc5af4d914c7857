"""One frame: the history of looks as a screen of a given size. What matters least is left out of a small one.

Must not know: where looks come from, terminals, keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tokenmill_cli.top.cells import ALARM, FIGURE, LABEL, QUIET, seconds
from tokenmill_cli.top.history import History
from tokenmill_cli.top.sections import Section, charts, executors, reasons, requests, tables, totals
from tokenmill_cli.top.view import KEYS, View

# A screen that has room for two panels side by side, for three, for why a request waits, for tall panels and for very tall ones.
_WIDE, _WIDER, _SAYS_WHY, _TALL, _TALLER = 92, 140, 116, 24, 44
_CHART_LINES, _TALL_CHART_LINES = 4, 8
# What each request's row leaves out last of all.
_LIST_RANK = 4


def frame(
    history: History, server: str, width: int, height: int, now: datetime, view: View | None = None, trouble: str = ""
) -> RenderableType:
    """`view`: as chosen by keys; None: there are none. `trouble`: why the last look is not of now."""
    wide = width >= _WIDE
    lines = 0 if not wide or height < _TALL else _TALL_CHART_LINES if height >= _TALLER else _CHART_LINES
    sections = [
        _head(history, server, now, view),
        _alarm(history, width, trouble),
        charts(history, width, 3 if width >= _WIDER or not lines else 2, lines),
        tables(history, width, wide),
        executors(history.last.executors, width),
        reasons(history.last.load, width),
        None,
        totals(history, width),
        _keys(view, width),
    ]
    if view is not None and view.help:
        return Group(*_fitting([sections[0], *_help(view)], height))
    left = height - sum(section.height for section in sections if section is not None and section.rank != _LIST_RANK)
    sections[6] = requests(history, view or View(), width, now, left - 1, width >= _SAYS_WHY)
    return Group(*_fitting(sections, height))


def _fitting(sections: Sequence[Section | None], height: int) -> list[RenderableType]:
    kept = [section for section in sections if section is not None]
    while len(kept) > 1 and sum(section.height for section in kept) > height:
        kept.remove(max(kept, key=lambda section: section.rank))
    return [section.drawn for section in kept]


def _head(history: History, server: str, now: datetime, view: View | None) -> Section:
    load = history.last.load
    line = Table.grid(expand=True)
    line.add_column(no_wrap=True, ratio=1)
    line.add_column(justify="right", no_wrap=True, min_width=9)
    left = Text.assemble((" tokenmill ", "bold reverse"), "  ", (server, "bold"), f"   {load.policy}, {load.batching} batching")
    if view is not None and view.paused:
        left.append("   paused, p goes on", "bold yellow")
    line.add_row(left, Text(now.strftime("%H:%M:%S "), QUIET))
    return Section(0, 1, line)


def _alarm(history: History, width: int, trouble: str) -> Section | None:
    """A line of its own, so that it is read to its end."""
    load = history.last.load
    parts = []
    if trouble:
        parts.append((trouble, ALARM))
    if load.overload_stage:
        parts.append((f"overload stage {load.overload_stage}: {load.overload_reason}", ALARM))
    if load.queue_paused:
        parts.append((f"queue paused {load.queue_pause_reason}", "bold yellow"))
    if not parts:
        return None
    line = Text("   ").join([Text(words, style) for words, style in parts])
    line.truncate(width, overflow="ellipsis")
    return Section(0, 1, line)


def _keys(view: View | None, width: int) -> Section | None:
    """What they do now."""
    if view is None:
        return None
    told = (
        ("q", "quit"),
        ("p", "go on" if view.paused else "pause"),
        ("s", f"by {view.order}"),
        ("l", f"lane {view.lane or 'all'}"),
        ("+-", f"every {seconds(view.interval_s)}"),
        ("?", "help"),
    )
    line = Text(no_wrap=True)
    for key, does in told:
        line.append(f" {key} ", "reverse")
        line.append(f" {does}   ", QUIET)
    line.truncate(width, overflow="ellipsis")
    return Section(5, 1, line)


def _help(view: View) -> list[Section]:
    more = f"  It looks every {seconds(view.interval_s)}. Any other key goes back; Ctrl-C quits, too."
    lines = [Text.assemble((f"  {key}  ", FIGURE), does) for key, does in KEYS.items()]
    return [Section(1, 2, Text("\n  Keys", LABEL)), *(Section(2, 1, line) for line in [Text(), *lines, Text(), Text(more, QUIET)])]
