"""`tokenmill top`: what a series of looks comes to, and how it is drawn at any size."""

from __future__ import annotations

import io
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from rich.console import Console
from tokenmill_cli.top.charts import area, bar, nice_top
from tokenmill_cli.top.frame import frame
from tokenmill_cli.top.history import History, Look, percentile
from tokenmill_client.records import Executor, Lane, LaneLoad, LatencyHistogram, Load, RequestInfo, RequestState, Usage

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


def drawn(history: History, width: int, height: int, trouble: str = "") -> list[str]:
    screen = Console(file=io.StringIO(), width=width, height=height, record=True, highlight=False)
    screen.print(frame(history, "127.0.0.1:7600", width, height, NOW, trouble))
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


@pytest.mark.parametrize(("width", "height"), [(200, 60), (120, 34), (92, 24), (80, 24), (60, 16), (40, 8), (20, 3), (5, 1)])
def test_a_frame_fits_its_screen_and_keeps_what_matters_most(history: History, width: int, height: int) -> None:
    lines = drawn(history, width, height)
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
