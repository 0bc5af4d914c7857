"""What a frame is made of, each part for a given width. Must not know: which of them are shown, where looks come from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from tokenmill_client.admin_records import Executor, LatencyHistogram, Load
from tokenmill_client.records import RequestInfo

from tokenmill_cli.output import age
from tokenmill_cli.top.cells import ALARM, FIGURE, LABEL, QUIET, grid, seconds, short
from tokenmill_cli.top.charts import area, bar, nice_top
from tokenmill_cli.top.history import History
from tokenmill_cli.top.view import View

_SHARES = (0.5, 0.9, 0.99)
_LANE_STYLES = {"real_time": "magenta", "standard": "cyan", "batch": "blue"}
_STATE_STYLES = {"waiting": "yellow", "preempted": "red", "prefill": "cyan", "decode": "green"}
_LANE_COLUMNS_WIDTH, _LEAST_BAR = 46, 14
_MOST_EXECUTORS = 8


@dataclass(frozen=True, slots=True)
class Section:
    """`height` is in lines; those of a lower `rank` are left out last."""

    rank: int
    height: int
    drawn: RenderableType


# ---- charts --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Chart:
    """`values` against `top`; `figure` is what they come to now, `note` what says more."""

    title: str
    figure: str
    note: str
    values: Sequence[float]
    top: float
    style: str


def charts(history: History, width: int, count: int, lines: int) -> Section:
    """The first `count` of them side by side, as panels with so many lines for the chart; 0: a line each."""
    shown = _charts(history)[:count]
    if not lines:
        grid = Table.grid(padding=(0, 1))
        for chart in shown:
            figure = Text(f"{chart.figure:>7}", FIGURE)
            grid.add_row(Text(chart.title, LABEL), figure, area(chart.values, width - 28, 1, chart.top, chart.style))
        return Section(1, 1 + len(shown), Group(grid, Text()))
    grid = Table.grid(expand=True)
    for _ in shown:
        grid.add_column(ratio=1)
    grid.add_row(*(_panel(chart, history.window_s(width // count - 4), width // count - 4, lines) for chart in shown))
    return Section(2, lines + 2, grid)


def _charts(history: History) -> tuple[_Chart, ...]:
    load = history.last.load
    occupancies, tokens, waiting = history.occupancies(), history.rates(output_tokens), history.waiting()
    occupancy = f"{occupancies[-1] if occupancies else load.batch_occupancy:.0%}"
    top, most = nice_top(max(tokens, default=0.0)), nice_top(max(waiting, default=0.0))
    running, rate = f"{load.num_requests_running:,} running", f"{history.rate(output_tokens):,.0f}"
    return (
        _Chart("batch occupancy", occupancy, running, occupancies, 1.0, "green"),
        _Chart("output tokens/s", rate, f"full height {top:,.0f}", tokens, top, "cyan"),
        _Chart("waiting", f"{load.num_requests_waiting:,}", f"full height {most:,.0f}", waiting, most, "yellow"),
    )


def _panel(chart: _Chart, window_s: float, width: int, lines: int) -> Panel:
    drawn = area(chart.values, width, lines, chart.top, chart.style)
    title = Text.assemble((f" {chart.title} ", LABEL), (f"{chart.figure} ", FIGURE))
    since = f" {seconds(window_s)} " if window_s else " "
    note = Text(f"{since}·  {chart.note} ", QUIET)
    return Panel(drawn, title=title, title_align="left", subtitle=note, subtitle_align="right", border_style="dim")


def output_tokens(load: Load) -> float:
    return load.output_tokens


# ---- lanes and latencies -------------------------------------------------------------------------------------------------------


def tables(history: History, width: int, wide: bool) -> Section:
    of_lanes = _lanes(history.last.load, (width // 2 if wide else width) - _LANE_COLUMNS_WIDTH)
    latencies = _latencies(history)
    height = 1 + max(of_lanes.row_count, 1)
    if not wide:
        return Section(1, height + 3 + latencies.row_count, Group(of_lanes, Text(), latencies, Text()))
    grid = Table.grid(expand=True)
    grid.add_column(ratio=1)
    grid.add_column(ratio=1)
    grid.add_row(of_lanes, latencies)
    return Section(1, height + 1, Group(grid, Text()))


def _lanes(load: Load, room: int) -> Table:
    """With a bar of what runs and what waits, where there is room: all bars have one scale."""
    has_bars = room >= _LEAST_BAR
    table = grid(("lane", "running", "waiting", "oldest waits", *(("█ runs ░ waits",) if has_bars else ())), left=4)
    most = max((lane.running + lane.waiting for lane in load.lanes), default=0)
    for lane in load.lanes:
        style, there = _LANE_STYLES.get(lane.lane, ""), lane.running + lane.waiting
        waits = seconds(lane.oldest_wait_s) if lane.waiting else "–"
        waiting = Text(f"{lane.waiting:,}", "yellow" if lane.waiting else "")
        parts = [(lane.running, "█", style), (lane.waiting, "░", style)]
        bars = [bar(parts, max(round(room * there / most) if most else 0, 2 * bool(there)))] if has_bars else []
        table.add_row(Text(lane.lane, style), f"{lane.running:,}", waiting, waits, *bars)
    return table


def _latencies(history: History) -> Table:
    table = grid((_of_late(history), "p50", "p90", "p99"))

    def row(name: str, of: str) -> None:
        def histogram(load: Load) -> LatencyHistogram:
            found: LatencyHistogram = getattr(load, of)
            return found

        table.add_row(name, *("–" if value is None else seconds(value) for value in history.percentiles(histogram, _SHARES)))

    row("time in queue", "request_queue_time")
    row("time to first token", "time_to_first_token")
    row("between tokens", "inter_token_latency")
    return table


def _of_late(history: History) -> str:
    """What the latencies are of."""
    if not history.latencies_s:
        return "since it began"
    return "of the last minute" if 59 < history.latencies_s <= 60 else f"of the last {seconds(history.latencies_s)}"


# ---- executors -----------------------------------------------------------------------------------------------------------------


def executors(known: Sequence[Executor], width: int) -> Section:
    """Their KV blocks; of very many the first by name, those that are lost before."""
    in_order = sorted(known, key=lambda executor: (executor.connected, executor.name))
    shown = in_order if len(in_order) <= _MOST_EXECUTORS else in_order[: _MOST_EXECUTORS - 1]
    table = Table.grid(padding=(0, 1))
    for _ in range(3):
        table.add_column(no_wrap=True)
    name_width = min(max((len(executor.name) for executor in shown), default=0), 24)
    room = max(10, width - name_width - 46)
    for executor in shown:
        table.add_row(*_executor_row(executor, name_width, room))
    if len(shown) < len(in_order):
        table.add_row(Text(f"and {len(in_order) - len(shown)} more", QUIET))
    if not in_order:
        table.add_row(Text("no executor has joined yet", "yellow"))
    held, cached, free = ("█", "green"), ("▓", "blue"), ("░", "bright_black")
    legend = Text.assemble(("KV blocks  ", LABEL), held, " held  ", cached, " cached  ", free, " free")
    return Section(2, 2 + max(table.row_count, 1), Group(legend, table, Text()))


def _executor_row(executor: Executor, name_width: int, room: int) -> tuple[RenderableType, ...]:
    name = Text(executor.name, "" if executor.connected else ALARM, no_wrap=True)
    name.truncate(name_width, overflow="ellipsis", pad=True)
    if not executor.connected:
        return name, Text("not connected", ALARM), ""
    parts = [
        (executor.held_blocks, "█", "green"),
        (executor.cached_blocks, "▓", "blue"),
        (executor.free_blocks, "░", "bright_black"),
    ]
    held = executor.held_blocks / executor.total_blocks if executor.total_blocks else 0.0
    words = Text.assemble(
        (f"{held:4.0%}", FIGURE), f" of {executor.total_blocks:,}, {executor.running:,} running, idle {executor.idle_share:.1%}"
    )
    if executor.draining:
        words.append(", drained", "yellow")
    return name, bar(parts, room), words


# ---- requests ------------------------------------------------------------------------------------------------------------------


def reasons(load: Load, width: int) -> Section | None:
    if not load.wait_reasons:
        return None
    words = Text.assemble(("why they wait  ", LABEL))
    for code, count in sorted(load.wait_reasons.items(), key=lambda item: (-item[1], item[0])):
        words.append(f"{count:,} ", FIGURE)
        words.append(f"{code.replace('_', ' ')}   ")
    words.truncate(width, overflow="ellipsis")
    return Section(3, 2, Group(words, Text()))


def requests(history: History, view: View, width: int, now: datetime, rows: int, wide: bool) -> Section | None:
    """As many as there is room for; why those that wait do so, on a wide screen."""
    shown = view.chosen(history.last.oldest)[: max(rows, 0)]
    if not shown:
        return None
    title = "slowest requests" if view.lane is None else f"slowest of {view.lane}"
    columns = (title, "state", "lane", "prio", "tokens", "age", "tenant", *(("why it waits",) if wide else ()))
    table = grid(columns, right=("prio", "tokens", "age"))
    for info in shown:
        table.add_row(*_request_cells(info, now), *([short(info.wait_reason, width - 92, QUIET)] if wide else []))
    return Section(4, 1 + len(shown), table)


def _request_cells(info: RequestInfo, now: datetime) -> tuple[RenderableType, ...]:
    state = Text(info.state, _STATE_STYLES.get(info.state, ""))
    lane = Text(info.lane, _LANE_STYLES.get(info.lane, ""))
    tokens = f"{info.usage.prompt_tokens:,}+{info.usage.output_tokens:,}"
    of = age(info.submitted_at, now)
    return short(info.request_id, 30), state, lane, str(info.priority), tokens, of, short(info.tenant, 12)


def totals(history: History, width: int) -> Section:
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
    words = Text("   ".join(parts), QUIET)
    words.truncate(width, overflow="ellipsis")
    return Section(3, 1, words)
