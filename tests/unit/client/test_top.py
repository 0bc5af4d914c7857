"""`tokenmill top`: what a series of looks comes to, and how it is drawn at any size."""

from __future__ import annotations

import io
import os
import pty
import termios
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from rich.console import Console
from tokenmill_cli.top.charts import area, bar, nice_top
from tokenmill_cli.top.frame import frame
from tokenmill_cli.top.history import History, Look, percentile
from tokenmill_cli.top.keys import keys_of
from tokenmill_cli.top.view import KEYS, Order, View
from tokenmill_cli.top.watch import watch
from tokenmill_client import Unavailable
from tokenmill_client.admin_records import Executor, LaneLoad, LatencyHistogram, Load
from tokenmill_client.records import Lane, RequestInfo, RequestState, Usage

NOW = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)
BOUNDS = (0.01, 0.1, 1.0)


def load(steps: int, tokens: int = 0, occupancy_sum: float = 0.0, latencies: tuple[int, ...] = (0, 0, 0, 0)) -> Load:
    histogram = LatencyHistogram(BOUNDS, latencies, 0.0)
    lanes = tuple(LaneLoad(lane, running, 10 * running, 61.0) for running, lane in enumerate(Lane))
    return Load(
        3, 30, 8, 512, 0.5, 0.25, 4, tokens, 7, steps, 0, 2, 5, "continuous", "priority", False, 100, 25, "",
        lanes, histogram, histogram, histogram, occupancy_sum, {"no_slot": 20, "no_blocks": 10}, 6, {"stop": 9, "length": 0},
        0, "", 0, 0, 900,
    )  # fmt: skip


def executor(name: str = "executor-1", connected: bool = True) -> Executor:
    return Executor(name, "unix:/x", "tiny", connected, 1, "cpu", 16, 100, 30, 50, 20, 3, 12, 0.004, NOW, False, "s")


def request_info(index: int) -> RequestInfo:
    return RequestInfo(
        f"req-{index:026}", "tiny", "acme", RequestState.WAITING, None, "", 5, Usage(12, 3), NOW - timedelta(seconds=90),
        None, None, None, 0, False, "no free slot", "", Lane.BATCH, "",
    )  # fmt: skip


def look(at_s: float, of: Load, requests: int = 0) -> Look:
    return Look(at_s, of, (executor(),), tuple(request_info(index) for index in range(requests)))


def drawn(history: History, width: int, height: int, trouble: str = "", view: View | None = None) -> list[str]:
    screen = Console(file=io.StringIO(), width=width, height=height, record=True, highlight=False)
    screen.print(frame(history, "127.0.0.1:7600", width, height, NOW, view, trouble))
    return screen.export_text().splitlines()


# ---- history -------------------------------------------------------------------------------------------------------------------


def test_rates_are_of_the_last_seconds_and_series_of_each_look() -> None:
    history = History()
    for second in range(11):
        tokens = 10 * second if second <= 5 else 50 + 100 * (second - 5)
        history.add(look(float(second), load(steps=2 * second, tokens=tokens, occupancy_sum=0.5 * second)))
    assert history.rate(lambda of: of.output_tokens) == 100
    assert history.rates(lambda of: of.output_tokens) == [10.0] * 5 + [100.0] * 5
    assert history.occupancies() == [0.25] * 10


def test_one_look_has_no_rates_and_latencies_of_all_time() -> None:
    history = History()
    history.add(look(0.0, load(steps=5, tokens=50, latencies=(0, 4, 0, 0))))
    assert history.rate(lambda of: of.output_tokens) == 0
    assert history.rates(lambda of: of.output_tokens) == history.occupancies() == []
    assert history.percentiles(lambda of: of.inter_token_latency, (0.5, 1.0)) == [pytest.approx(0.055), pytest.approx(0.1)]


def test_percentiles_are_of_the_last_minute() -> None:
    history = History()
    history.add(look(0.0, load(1, latencies=(0, 0, 100, 0))))
    history.add(look(50.0, load(2, latencies=(0, 0, 100, 0))))
    history.add(look(100.0, load(3, latencies=(4, 0, 100, 0))))
    assert history.percentiles(lambda of: of.time_to_first_token, (0.5, 0.99)) == [pytest.approx(0.005), pytest.approx(0.0099)]
    history.add(look(200.0, load(4, latencies=(4, 0, 100, 0))))
    assert history.percentiles(lambda of: of.time_to_first_token, (0.5,)) == [None]


def test_a_scheduler_that_was_started_anew_has_no_past() -> None:
    history = History()
    history.add(look(0.0, load(steps=100, tokens=1_000)))
    history.add(look(1.0, load(steps=2, tokens=20)))
    assert history.rates(lambda of: of.output_tokens) == []
    assert history.last.load.steps == 2


def test_a_percentile_beyond_the_last_bound_is_that_bound() -> None:
    assert percentile(BOUNDS, [0, 0, 0, 3], 0.5) == 1.0
    assert percentile(BOUNDS, [1, 0, 0, 3], 0.25) == 0.01
    assert percentile((), [], 0.5) is None


# ---- charts --------------------------------------------------------------------------------------------------------------------


def test_an_area_shows_the_newest_at_the_right_and_nothing_as_nothing() -> None:
    assert area([0.0, 0.5, 1.0], 4, 1, 1.0, "").plain == "  ▄█"
    assert area([9.0, 0.25, 1.0], 2, 2, 1.0, "").plain == " █\n▄█"
    assert area([0.001], 1, 1, 1.0, "").plain == "▁", "little is not nothing"
    assert area([0.0], 2, 1, 0.0, "").plain == "  "


def test_a_bar_fills_its_width_and_hides_nothing() -> None:
    assert bar([(50, "h", ""), (25, "c", ""), (25, "f", "")], 8).plain == "hhhhccff"
    assert bar([(9_999, "h", ""), (1, "c", ""), (0, "f", "")], 8).plain == "hhhhhhhc"
    assert bar([(1, "h", ""), (9_999, "c", ""), (1, "f", "")], 8).plain == "hccccccf"
    assert bar([(0, "h", ""), (0, "c", ""), (0, "f", "")], 8).plain == ""


@pytest.mark.parametrize(("value", "top"), [(0.0, 1), (1.0, 1), (1.5, 2), (4.0, 5), (51.0, 100), (1_001.0, 2_000)])
def test_a_scale_has_round_numbers(value: float, top: float) -> None:
    assert nice_top(value) == top


# ---- frames --------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def history() -> History:
    history = History()
    for second in range(40):
        history.add(look(float(second), load(second, 100 * second, 0.5 * second, (second, second, 0, 0)), requests=50))
    return history


@pytest.mark.parametrize("view", [None, View()])
@pytest.mark.parametrize(("width", "height"), [(200, 60), (120, 34), (92, 24), (80, 24), (60, 16), (40, 8), (20, 3), (5, 1)])
def test_a_frame_fits_its_screen_and_keeps_what_matters_most(history: History, width: int, height: int, view: View | None) -> None:
    lines = drawn(history, width, height, view=view)
    assert len(lines) <= height
    assert all(len(line) <= width for line in lines)
    text = "\n".join(lines)
    if height >= 16:
        for words in ("real_time", "61 s", "time to first token", "between tokens", "50%"):
            assert words in text
    if height >= 24:
        assert "req-0" in text


def test_a_frame_says_all_there_is_to_say(history: History) -> None:
    text = "\n".join(drawn(history, 160, 40))
    for words in (
        "127.0.0.1:7600   priority, continuous batching", "batch occupancy 50%", "output tokens/s 100", "full height 100",
        "3 running", "why they wait", "20 no slot   10 no blocks", "50% of 100, 3 running, idle 0.4%", "no free slot",
        "12+3", "1m30s", "steps/s 1", "prefix hits 25%", "preempted 4", "out of blocks 2", "ledger backlog 5", "ended 9 stop",
    ):  # fmt: skip
        assert words in text, words


def test_trouble_and_what_an_operator_holds_back_are_told(history: History) -> None:
    last = history.last
    held = replace(
        last.load,
        queue_paused=True,
        queue_pause_reason="by ann",
        overload_stage=2,
        overload_reason="it waits",
        recomputed_tokens=70,
    )
    gone, drained = executor("gone", connected=False), replace(executor(), draining=True)
    history.add(Look(50.0, held, (gone, drained), ()))
    text = "\n".join(drawn(history, 160, 40, trouble="no answer"))
    told = (
        "queue paused by ann",
        "overload stage 2: it waits",
        "no answer",
        "not connected",
        "drained",
        "preempted 4, 70 tokens again",
    )
    for words in told:
        assert words in text
    history.add(Look(51.0, held, (), ()))
    assert "no executor has joined yet" in "\n".join(drawn(history, 100, 30))


def test_latencies_are_told_of_as_long_as_they_are_of() -> None:
    history, told = History(), []
    for at_s in (0.0, 0.5, 12.0, 59.9, 400.0):
        history.add(look(at_s, load(steps=int(at_s) + 1)))
        told.append(next(line for line in drawn(history, 100, 30) if "p50" in line).split("waits")[-1].split("p50")[0].strip())
    assert told == ["since it began", "of the last 500 ms", "of the last 12 s", "of the last minute", "of the last 6 min"]


def test_a_lanes_bar_shows_what_runs_and_what_waits_on_one_scale(history: History) -> None:
    lanes = {line.split()[0]: line for line in drawn(history, 80, 40) if line.split()[:1] and line.split()[0] in set(Lane)}
    counts = {lane: (line.count("█"), line.count("░")) for lane, line in lanes.items()}
    assert counts["real_time"] == (0, 0)
    assert 0 < sum(counts["standard"]) < sum(counts["batch"])
    assert counts["batch"][1] > 5 * counts["batch"][0] > 0


def test_of_very_many_executors_the_lost_come_first_and_the_rest_is_counted(history: History) -> None:
    many = tuple(executor(f"x{number:02}", connected=number != 17) for number in range(20))
    history.add(Look(50.0, history.last.load, many, ()))
    text = "\n".join(drawn(history, 120, 60))
    assert "and 13 more" in text
    assert text.index("x17") < text.index("x00") < text.index("x05") < text.index("and 13 more")
    assert "x06" not in text


# ---- keys ----------------------------------------------------------------------------------------------------------------------


def views(keys: str) -> list[View]:
    view, after = View(), []
    for key in keys:
        view = view.pressed(key)
        after.append(view)
    return after


def test_keys_change_the_view() -> None:
    assert [view.order for view in views("sssS")] == [Order.TOKENS, Order.PRIORITY, Order.AGE, Order.TOKENS]
    assert [view.lane for view in views("lllll")] == [*Lane, None, Lane.REAL_TIME]
    assert [view.paused for view in views("pp")] == [True, False]
    assert [view.help for view in views("??")] == [True, False]
    assert [(view.help, view.paused) for view in views("?p")][-1] == (False, True)
    assert [view.interval_s for view in views("+" * 10 + "-" * 20)][9::20] == [0.1, 60.0]
    assert [view.quits for view in views("xq")] == [False, True]
    assert views("\x1b") == [View()]


def test_the_chosen_order_and_lane_are_shown(history: History) -> None:
    infos = [
        replace(request_info(0), lane=Lane.STANDARD, priority=1, usage=Usage(5, 5)),
        replace(request_info(1), priority=2, usage=Usage(900, 0)),
        replace(request_info(2), priority=9, usage=Usage(20, 0), submitted_at=NOW - timedelta(seconds=300)),
    ]

    def order(view: View) -> list[str]:
        history.add(Look(history.last.at_s + 1, history.last.load, (executor(),), tuple(infos)))
        return [line.split()[0][-1] for line in drawn(history, 100, 40, view=view) if line.startswith("req-")]

    assert order(View()) == ["2", "0", "1"]
    assert order(View(order=Order.TOKENS)) == ["1", "2", "0"]
    assert order(View(order=Order.PRIORITY, lane=Lane.BATCH)) == ["2", "1"]
    text = "\n".join(drawn(history, 100, 40, view=View(0.25, Order.TOKENS, Lane.BATCH, paused=True)))
    for words in ("paused, p goes on", "slowest of batch", "by tokens", "lane batch", "every 250 ms", "go on"):
        assert words in text, words


def test_help_tells_every_key_on_any_screen(history: History) -> None:
    text = "\n".join(drawn(history, 80, 24, view=View(help=True)))
    assert all(does in text for does in KEYS.values())
    assert "real_time" not in text
    assert len(drawn(history, 20, 3, view=View(help=True))) <= 3


class Terminal:
    """Someone who presses keys at given times, and a clock that stands still but for the waiting."""

    def __init__(self, *pressed: tuple[float, str]) -> None:
        self.now_s = 0.0
        self.pressed = [*pressed]
        self.looked: list[tuple[float, Lane | None]] = []
        self.drawn: list[tuple[float, bool, str]] = []
        self.away: list[float] = []

    def clock(self) -> float:
        return self.now_s

    def wait(self, seconds: float) -> str | None:
        until_s = self.now_s + max(seconds, 0.0)
        if self.pressed and self.pressed[0][0] <= until_s:
            self.now_s, key = self.pressed.pop(0)
            return key
        self.now_s = until_s
        return None

    def look(self, lane: Lane | None) -> Look:
        self.looked.append((self.now_s, lane))
        if self.now_s in self.away:
            raise Unavailable("nobody there")
        return look(self.now_s, load(steps=int(self.now_s)))

    def draw(self, history: History, view: View, trouble: str) -> None:
        self.drawn.append((self.now_s, view.paused, trouble))

    def watch(self) -> None:
        watch(self.look, self.draw, self, View(1.0), self.clock)


def test_it_looks_at_intervals_until_q() -> None:
    terminal = Terminal((2.5, "x"), (3.25, "q"))
    terminal.away = [2.0]
    terminal.watch()
    assert terminal.looked == [(0.0, None), (1.0, None), (2.0, None), (3.0, None)]
    assert [(at_s, trouble) for at_s, _, trouble in terminal.drawn] == [
        (0.0, ""), (1.0, ""), (2.0, "no answer: nobody there"), (2.5, "no answer: nobody there"), (3.0, ""),
    ]  # fmt: skip


def test_paused_it_does_not_look_and_then_at_once() -> None:
    terminal = Terminal((1.5, "p"), (30.25, "s"), (40.0, "p"), (41.5, "q"))
    terminal.watch()
    assert [at_s for at_s, _ in terminal.looked] == [0.0, 1.0, 40.0, 41.0]
    assert any(paused for _, paused, _ in terminal.drawn)


def test_another_lane_is_looked_for_at_once_and_a_shorter_interval_begins_now() -> None:
    terminal = Terminal((0.25, "l"), (0.5, "-"), (3.0, "+"), (3.125, "+"), (4.25, "q"))
    terminal.watch()
    assert [lane for _, lane in terminal.looked] == [None] + [Lane.REAL_TIME] * 4
    assert [at_s for at_s, _ in terminal.looked] == [0.0, 0.25, 1.25, 3.25, 3.75]


def test_a_scheduler_that_was_never_there_is_not_waited_for() -> None:
    terminal = Terminal()
    terminal.away = [0.0]
    with pytest.raises(Unavailable):
        terminal.watch()


def test_keys_of_a_terminal_come_one_by_one_and_its_mode_is_put_back() -> None:
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "r") as source:
        before = termios.tcgetattr(source)
        with keys_of(source) as keys:
            assert not termios.tcgetattr(source)[3] & (termios.ICANON | termios.ECHO)
            assert keys.wait(0.0) is None
            os.write(ours, b"q")
            assert keys.wait(60.0) == "q"
            os.write(ours, b"\x1b[A")
            assert keys.wait(60.0) == "", "an arrow is no key"
        assert termios.tcgetattr(source) == before
    os.close(ours)


def test_without_a_terminal_there_are_no_keys() -> None:
    with keys_of(io.StringIO("q")) as keys:
        assert keys.wait(0.0) is None
