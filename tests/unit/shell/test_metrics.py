"""What the loop counts: against a plain account of every token, and over the whole life of requests."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import pytest
from tokenmill_scheduler.core.effects import TokensGenerated, Transitioned
from tokenmill_scheduler.core.events import PolicyChanged
from tokenmill_scheduler.core.request import FinishReason, Lane, State
from tokenmill_scheduler.core.scheduler import SchedulerConfig
from tokenmill_scheduler.metrics import Metrics
from tokenmill_scheduler.recovery import take_up
from tokenmill_service.histogram import Histogram

from tests.fakes.memory_ledger import MemoryLedger
from tests.fakes.shell import Shell, request, settle


def tokens(request_ids: Sequence[str], counts: Sequence[int] = ()) -> TokensGenerated:
    """So many for each, or one."""
    counts = tuple(counts) or (1,) * len(request_ids)
    return TokensGenerated(tuple(request_ids), (1,) * len(request_ids), counts, (1,) * sum(counts), 0.0)


def move(request_id: str, before: State, after: State, at_s: float = 0.0) -> Transitioned:
    reason = {State.DONE: FinishReason.STOP, State.CANCELLED: FinishReason.CANCELLED}.get(after)
    return Transitioned(request_id, before, after, at_s, finish_reason=reason)


def count(histogram: Histogram) -> int:
    return sum(histogram.counts)


# ---- histograms ----------------------------------------------------------------------------------------------------------------


def test_a_bound_belongs_to_its_bucket_as_prometheus_has_it() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.0, 1.0, 1.5, 2.0, 2.5):
        histogram.observe(value)
    histogram.observe(9.0, times=3)
    assert histogram.counts == [2, 2, 4]
    assert histogram.total == 7.0 + 27.0


# ---- latencies -----------------------------------------------------------------------------------------------------------------


class Account:
    """What each token of each request should have been counted as, one by one."""

    def __init__(self) -> None:
        self.last: dict[str, float] = {}
        self.seen: dict[tuple[str, Lane], list[float]] = defaultdict(list)

    def told(self, request_id: str, lane: Lane, arrival_s: float, now_s: float, count: int) -> None:
        """Tokens that come together have come in equal parts of the time since the one before; a first one has none before."""
        if request_id not in self.last:
            self.seen["first", lane].append(now_s - arrival_s)
            count -= 1
        since_s = self.last.get(request_id, now_s)
        self.seen["between", lane] += [(now_s - since_s) / max(count, 1)] * count
        self.last[request_id] = now_s

    def histogram(self, kind: str, lane: Lane, bounds: tuple[float, ...]) -> Histogram:
        histogram = Histogram(bounds)
        for value in self.seen[kind, lane]:
            histogram.observe(value)
        return histogram


@pytest.mark.parametrize("seed", range(20))
def test_every_token_is_counted_once_with_its_own_gap(seed: int) -> None:
    """Requests come, go, step together for a while, change company and sit out, as on several executors."""
    rng = random.Random(seed)
    metrics, account = Metrics("fcfs"), Account()
    lanes: dict[str, Lane] = {}
    arrivals: dict[str, float] = {}
    batch: list[str] = []
    now_s = 0.0
    for index in range(600):
        now_s += rng.choice([0.001, 0.01, 0.5])
        what = rng.random()
        if what < 0.1:
            name = f"r{index}"
            lanes[name], arrivals[name] = rng.choice(list(Lane)), now_s
            metrics.accept(replace(request(name), lane=lanes[name], arrival_s=now_s), now_s)
        elif what < 0.15 and lanes:
            gone = rng.choice(list(lanes))
            metrics.committed([move(gone, State.DECODE, State.DONE)], now_s, now_s)
            del lanes[gone]
            batch = [name for name in batch if name != gone]
        elif what < 0.3 and lanes:
            batch = rng.sample(list(lanes), rng.randrange(1, len(lanes) + 1))
        if batch:
            step = batch if rng.random() < 0.9 else rng.sample(batch, rng.randrange(1, len(batch) + 1))
            some = rng.choice([1, 1, 4])
            counts = [some if rng.random() < 0.97 else rng.randrange(1, 5) for _ in step]
            metrics.committed([tokens(step, counts)], now_s, now_s)
            for name, count in zip(step, counts, strict=True):
                account.told(name, lanes[name], arrivals[name], now_s, count)
    assert sum(map(len, account.seen.values())) > 500
    for kind, latency in (("first", metrics.time_to_first_token), ("between", metrics.inter_token)):
        for (lane, _), histogram in latency.histograms.items():
            expected = account.histogram(kind, lane, histogram.bounds)
            assert histogram.counts == expected.counts
            assert histogram.total == pytest.approx(expected.total)


def test_an_id_that_is_used_again_has_a_first_token_again() -> None:
    metrics = Metrics("fcfs")
    for name in "ab":
        metrics.accept(request(name), 0.0)
    metrics.committed([tokens("ab"), move("b", State.DECODE, State.CANCELLED)], 1.0, 1.0)
    metrics.accept(request("b"), 1.0)
    metrics.committed([tokens("ab")], 2.0, 2.0)
    assert count(metrics.time_to_first_token.total()) == 3
    assert count(metrics.inter_token.total()) == 1


def test_latencies_are_told_apart_by_the_policy_in_force() -> None:
    metrics = Metrics("fcfs")
    metrics.accept(request("a"), 0.0)
    metrics.committed([tokens("a")], 1.0, 1.0)
    metrics.use_policy("priority")
    metrics.committed([tokens("a")], 2.0, 2.0)
    metrics.use_policy("fcfs")
    metrics.committed([tokens("a")], 3.0, 3.0)
    counts = {policy: count(h) for (lane, policy), h in metrics.inter_token.histograms.items() if lane is Lane.STANDARD}
    assert counts == {"fcfs": 1, "priority": 1}
    assert count(metrics.inter_token.total()) == 2
    assert metrics.inter_token.total().total == 2.0


# ---- lives ---------------------------------------------------------------------------------------------------------------------


async def test_c69_a_preempted_and_resumed_request_has_one_first_token() -> None:
    shell = Shell.over(MemoryLedger(), config=SchedulerConfig(max_num_seqs=1, policy="priority"))
    metrics = shell.loop.metrics
    await shell.join()
    await shell.submit(request("low", max_tokens=6))
    await shell.step()
    await shell.step()
    await shell.submit(request("high", priority=9, max_tokens=2))
    await shell.run_out()
    assert shell.desk.load().preemptions == 1
    assert count(metrics.time_to_first_token.total()) == 2
    assert count(metrics.inter_token.total()) == 5 + 1
    assert metrics.finished[FinishReason.LENGTH] == metrics.accepted[Lane.STANDARD] == count(metrics.end_to_end.total()) == 2
    assert count(metrics.queue_time.total()) == count(metrics.scheduling_delay.total()) == 2, "a resume is no first plan"


async def test_c69_a_restart_counts_no_first_token_twice() -> None:
    ledger = MemoryLedger()
    first = Shell.over(ledger)
    await first.join()
    await first.submit(request("a", max_tokens=6))
    await first.step()
    assert count(first.loop.metrics.time_to_first_token.total()) == 1
    await first.submit(request("b"))
    second = Shell.over(ledger)
    take_up(second.loop, list(ledger.unfinished()))
    await settle()
    await second.join()
    await second.run_out()
    metrics = second.loop.metrics
    assert count(metrics.time_to_first_token.total()) == 1, "that of b"
    assert metrics.finished[FinishReason.LENGTH] == 2
    assert metrics.accepted[Lane.STANDARD] == 0, "both were accepted by the first"


async def test_a_change_of_policy_is_a_change_of_label() -> None:
    shell = Shell.over(MemoryLedger())
    shell.loop.handle(PolicyChanged("sjf", fair_share=False, lane_shares=(0, 0, 0)))
    await shell.join()
    await shell.submit(request("a"))
    await shell.run_out()
    assert count(shell.loop.metrics.queue_time.histograms[Lane.STANDARD, "sjf"]) == 1


async def test_tokens_count_once_they_are_durable() -> None:
    shell = Shell.over(MemoryLedger())
    await shell.join()
    await shell.submit(request("a", max_tokens=2))
    shell.writer.hold = True
    await shell.step()
    assert count(shell.loop.metrics.time_to_first_token.total()) == 0
    shell.clock.now_s += 3.0
    shell.writer.commit()
    assert count(shell.loop.metrics.time_to_first_token.total()) == 1
    assert shell.loop.metrics.ledger_lag.total == pytest.approx(3.0)


async def test_lanes_follow_the_core() -> None:
    shell = Shell.over(MemoryLedger(), config=SchedulerConfig(max_num_seqs=1))
    await shell.join()
    await shell.submit(request("runs", lane=Lane.REAL_TIME))
    await shell.submit(request("waits", lane=Lane.BATCH))
    shell.clock.now_s += 5.0
    loads = {load.lane: (load.running, load.waiting, load.oldest_wait_s) for load in shell.desk.load().lanes}
    assert loads[Lane.REAL_TIME] == (1, 0, 0.0)
    assert loads[Lane.BATCH][:2] == (0, 1)
    assert loads[Lane.BATCH][2] >= 5.0
    await shell.run_out()
    assert {(load.running, load.waiting, load.oldest_wait_s) for load in shell.desk.load().lanes} == {(0, 0, 0.0)}
