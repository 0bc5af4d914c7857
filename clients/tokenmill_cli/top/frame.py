"""One frame: the history of looks as a screen of a given size. What matters least is left out of a small one.

Must not know: where looks come from, terminals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from tokenmill_client.records import Executor, LatencyHistogram, Load, RequestInfo

from tokenmill_cli.output import age
from tokenmill_cli.top.charts import area, bar, nice_top
from tokenmill_cli.top.history import History

_SHARES = (0.5, 0.9, 0.99)
# A screen that has room for panels side by side, and for tall ones.
_WIDE, _TALL = 92, 24
_CHART_LINES = 4
_LABEL, _FIGURE, _QUIET, _ALARM = "bold", "bold bright_white", "dim", "bold red"
_LANE_STYLES = {"real_time": "magenta", "standard": "cyan", "batch": "blue"}
_STATE_STYLES = {"waiting": "yellow", "preempted": "red", "prefill": "cyan", "decode": "green"}


@dataclass(frozen=True, slots=True)
class _Section:
    """`height` is in lines; those of a lower `rank` are left out last."""

    rank: int
    height: int
    drawn: RenderableType


def frame(history: History, server: str, width: int, height: int, now: datetime, trouble: str = "") -> RenderableType:
    """`trouble`: why the last look is not of now."""
    wide = width >= _WIDE
    sections = [
        _head(history, server, now, trouble),
        _charts(history, width, wide, height),
        _tables(history, wide),
        _executors(history.last.executors, width),
        _reasons(history.last.load, width),
        _totals(history, width),
    ]
    left = height - sum(section.height for section in sections if section is not None and section.rank < 4)
    sections.insert(5, _oldest(history, width, now, left - 2))
    return Group(*_fitting([section for section in sections if section is not None], height))


def _fitting(sections: Sequence[_Section], height: int) -> list[RenderableType]:
    kept = list(sections)
    while len(kept) > 1 and sum(section.height for section in kept) > height:
        kept.remove(max(kept, key=lambda section: section.rank))
    return [section.drawn for section in kept]


# ---- sections, from top to bottom ----------------------------------------------------------------------------------------------


def _head(history: History, server: str, now: datetime, trouble: str) -> _Section:
    load = history.last.load
    line = Table.grid(expand=True)
    line.add_column(no_wrap=True, ratio=1)
    line.add_column(justify="right", no_wrap=True, min_width=9)
    left = Text.assemble((" tokenmill ", "bold reverse"), "  ", (server, "bold"), f"   {load.policy}, {load.batching} batching")
    if load.queue_paused:
        left.append(f"   queue paused {load.queue_pause_reason}", "bold yellow")
    if load.overload_stage:
        left.append(f"   overload stage {load.overload_stage}: {load.overload_reason}", _ALARM)
    if trouble:
        left.append(f"   {trouble}", _ALARM)
    line.add_row(left, Text(now.strftime("%H:%M:%S "), _QUIET))
    return _Section(0, 1, line)


def _charts(history: History, width: int, wide: bool, height: int) -> _Section:
    """Two panels side by side where there is room, else a line each."""
    occupancies, tokens = history.occupancies(), history.rates(_output_tokens)
    occupancy = f"{occupancies[-1] if occupancies else history.last.load.batch_occupancy:.0%}"
    rate = f"{history.rate(_output_tokens):,.0f}"
    room = width // 2 - 4 if wide else width - 28
    top = nice_top(max(tokens[-room:], default=0.0))
    if not wide or height < _TALL:
        lines = Table.grid(padding=(0, 1))
        lines.add_row(Text("batch occupancy", _LABEL), Text(f"{occupancy:>7}", _FIGURE), area(occupancies, room, 1, 1.0, "green"))
        lines.add_row(Text("output tokens/s", _LABEL), Text(f"{rate:>7}", _FIGURE), area(tokens, room, 1, top, "cyan"))
        return _Section(1, 3, Group(lines, Text()))
    running = f"{history.last.load.num_requests_running} running"
    grid = Table.grid(expand=True)
    grid.add_column(ratio=1)
    grid.add_column(ratio=1)
    grid.add_row(
        _panel("batch occupancy", occupancy, running, area(occupancies, room, _CHART_LINES, 1.0, "green")),
        _panel("output tokens/s", rate, f"full height {top:,.0f}", area(tokens, room, _CHART_LINES, top, "cyan")),
    )
    return _Section(2, _CHART_LINES + 2, grid)


def _panel(title: str, figure: str, note: str, chart: Text) -> Panel:
    head = Text.assemble((f" {title} ", _LABEL), (f"{figure} ", _FIGURE))
    return Panel(
        chart, title=head, title_align="left", subtitle=Text(f" {note} ", _QUIET), subtitle_align="right", border_style="dim"
    )


def _tables(history: History, wide: bool) -> _Section:
    lanes, latencies = _lanes(history.last.load), _latencies(history)
    height = 1 + max(lanes.row_count, 1)
    if not wide:
        return _Section(1, height + 3 + latencies.row_count, Group(lanes, Text(), latencies, Text()))
    grid = Table.grid(expand=True)
    grid.add_column(ratio=1)
    grid.add_column(ratio=1)
    grid.add_row(lanes, latencies)
    return _Section(1, height + 1, Group(grid, Text()))


def _lanes(load: Load) -> Table:
    grid = _grid(("lane", "running", "waiting", "oldest waits"))
    for lane in load.lanes:
        waits = _seconds(lane.oldest_wait_s) if lane.waiting else "–"
        waiting = Text(f"{lane.waiting:,}", "yellow" if lane.waiting else "")
        grid.add_row(Text(lane.lane, _LANE_STYLES.get(lane.lane, "")), f"{lane.running:,}", waiting, waits)
    return grid


def _latencies(history: History) -> Table:
    grid = _grid(("of the last minute", "p50", "p90", "p99"))

    def row(name: str, of: str) -> None:
        def histogram(load: Load) -> LatencyHistogram:
            found: LatencyHistogram = getattr(load, of)
            return found

        grid.add_row(name, *("–" if value is None else _seconds(value) for value in history.percentiles(histogram, _SHARES)))

    row("time in queue", "request_queue_time")
    row("time to first token", "time_to_first_token")
    row("between tokens", "inter_token_latency")
    return grid


def _executors(known: Sequence[Executor], width: int) -> _Section:
    executors = sorted(known, key=lambda executor: executor.name)
    grid = Table.grid(padding=(0, 1))
    for _ in range(3):
        grid.add_column(no_wrap=True)
    name_width = min(max((len(executor.name) for executor in executors), default=0), 24)
    room = max(10, width - name_width - 46)
    for executor in executors:
        grid.add_row(*_executor_row(executor, name_width, room))
    if not executors:
        grid.add_row(Text("no executor has joined yet", "yellow"))
    legend = Text.assemble(
        ("KV blocks  ", _LABEL), ("█", "green"), " held  ", ("▓", "blue"), " cached  ", ("░", "bright_black"), " free"
    )
    return _Section(2, 2 + max(len(executors), 1), Group(legend, grid, Text()))


def _executor_row(executor: Executor, name_width: int, room: int) -> tuple[RenderableType, ...]:
    name = Text(executor.name, "" if executor.connected else _ALARM, no_wrap=True)
    name.truncate(name_width, overflow="ellipsis", pad=True)
    if not executor.connected:
        return name, Text("not connected", _ALARM), ""
    parts = [
        (executor.held_blocks, "█", "green"),
        (executor.cached_blocks, "▓", "blue"),
        (executor.free_blocks, "░", "bright_black"),
    ]
    held = executor.held_blocks / executor.total_blocks if executor.total_blocks else 0.0
    words = Text.assemble(
        (f"{held:4.0%}", _FIGURE), f" of {executor.total_blocks:,}, {executor.running:,} running, idle {executor.idle_share:.1%}"
    )
    if executor.draining:
        words.append(", drained", "yellow")
    return name, bar(parts, room), words


def _reasons(load: Load, width: int) -> _Section | None:
    if not load.wait_reasons:
        return None
    words = Text.assemble(("why they wait  ", _LABEL))
    for code, count in sorted(load.wait_reasons.items(), key=lambda item: (-item[1], item[0])):
        words.append(f"{count:,} ", _FIGURE)
        words.append(f"{code.replace('_', ' ')}   ")
    words.truncate(width, overflow="ellipsis")
    return _Section(3, 2, Group(words, Text()))


def _oldest(history: History, width: int, now: datetime, rows: int) -> _Section | None:
    """As many as there is room for; why those that wait do so, on a wide screen."""
    oldest = history.last.oldest[: max(rows, 0)]
    if not oldest:
        return None
    wide = width >= _WIDE + 24
    columns = ("slowest requests", "state", "lane", "prio", "tokens", "age", "tenant", *(("why it waits",) if wide else ()))
    grid = _grid(columns, right=("prio", "tokens", "age"))
    for info in oldest:
        cells = _request_cells(info, now)
        grid.add_row(*cells, *([_short(info.wait_reason, width - 92, _QUIET)] if wide else []))
    return _Section(4, 1 + len(oldest), grid)


def _request_cells(info: RequestInfo, now: datetime) -> tuple[RenderableType, ...]:
    state = Text(info.state, _STATE_STYLES.get(info.state, ""))
    lane = Text(info.lane, _LANE_STYLES.get(info.lane, ""))
    tokens = f"{info.usage.prompt_tokens:,}+{info.usage.output_tokens:,}"
    return (
        _short(info.request_id, 30),
        state,
        lane,
        str(info.priority),
        tokens,
        age(info.submitted_at, now),
        _short(info.tenant, 12),
    )


def _short(words: str, width: int, style: str = "") -> Text:
    text = Text(words, style, no_wrap=True)
    text.truncate(max(width, 8), overflow="ellipsis")
    return text


def _totals(history: History, width: int) -> _Section:
    load = history.last.load
    hits = load.prefix_cache_hits / load.prefix_cache_queries if load.prefix_cache_queries else 0.0
    ended = [f"{count:,} {reason}" for reason, count in load.finished.items() if count]
    parts = [
        f"steps/s {history.rate(lambda of: of.steps):,.0f}",
        f"prompt tokens/s {history.rate(lambda of: of.prompt_tokens):,.0f}",
        f"prefix hits {hits:.0%}",
        f"preempted {load.preemptions:,}" + (f", {load.recomputed_tokens:,} tokens again" if load.recomputed_tokens else ""),
        *([f"queued tokens {load.queued_tokens:,}"] if load.queued_tokens else []),
        f"streams {load.streams_open:,}",
        f"ledger backlog {load.ledger_backlog:,}",
        *([f"out of blocks {load.no_blocks:,}"] if load.no_blocks else []),
        *(["ended " + ", ".join(ended)] if ended else []),
    ]
    words = Text("   ".join(parts), _QUIET)
    words.truncate(width, overflow="ellipsis")
    return _Section(3, 1, words)


# ---- cells ---------------------------------------------------------------------------------------------------------------------


def _output_tokens(load: Load) -> float:
    return load.output_tokens


def _grid(columns: Sequence[str], right: Sequence[str] | None = None) -> Table:
    """Numbers, all columns but the first unless named, are set to the right."""
    grid = Table(box=None, pad_edge=False, header_style=_LABEL, padding=(0, 2, 0, 0))
    for column in columns:
        is_number = column in right if right is not None else column != columns[0]
        grid.add_column(column, justify="right" if is_number else "left", no_wrap=True)
    return grid


def _seconds(value: float) -> str:
    """In three figures and the unit that suits."""
    if value < 0.001:
        return f"{value * 1e6:.0f} µs"
    if value < 1:
        return f"{value * 1e3:.3g} ms" if value < 0.1 else f"{value * 1e3:.0f} ms"
    if value < 100:
        return f"{value:.3g} s"
    return f"{value / 60:.0f} min" if value < 6000 else f"{value / 3600:.0f} h"
