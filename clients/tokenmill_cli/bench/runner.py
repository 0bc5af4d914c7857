"""Sends a workload's requests when they are due and takes the times of what comes back.

Must not know: the command line, which server it is (`Target`), how figures are shown.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

from tokenmill_client import TokenmillError
from tokenmill_client.admin_records import Load
from tokenmill_workloads import Arrival, prompts

# Of what runs. Each look is a call, whose CPU time is missed where a model computes on the same cores.
_SAMPLE_INTERVAL_S = 1.0
# uvloop keeps time in whole milliseconds: its timers may end so much too soon.
_TIMER_TICK_S = 0.001


class TargetError(Exception):
    """The server refused or failed a request, or did not do what was asked; the message is a sentence."""


class Target(Protocol):
    """A server that makes tokens."""

    def generate(self, prompt: Sequence[int], output_tokens: int) -> AsyncIterator[int]:
        """Asks for exactly so many tokens, greedily; yields how many have come, as they come.

        Raises TokenmillError or TargetError.
        """
        ...

    async def load(self) -> Load | None:
        """How busy it is; None when it does not say."""
        ...


@dataclass(frozen=True, slots=True)
class Workload:
    """`prompts` has the token ids of each arrival's prompt."""

    name: str
    arrivals: tuple[Arrival, ...]
    prompts: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, name: str, arrivals: Sequence[Arrival], vocab_size: int, seed: int) -> Workload:
        return cls(name, tuple(arrivals), tuple(prompts(arrivals, vocab_size, seed)))

    @property
    def output_tokens(self) -> int:
        return sum(arrival.output_tokens for arrival in self.arrivals)


@dataclass(frozen=True, slots=True)
class RequestTiming:
    """In seconds since the workload's start. `token_times_s` and `token_counts`: when tokens came, and how many at once."""

    prompt_tokens: int
    sent_s: float
    finished_s: float
    token_times_s: tuple[float, ...]
    token_counts: tuple[int, ...]

    @property
    def output_tokens(self) -> int:
        return sum(self.token_counts)

    @property
    def time_to_first_token_s(self) -> float:
        return self.token_times_s[0] - self.sent_s

    @property
    def time_per_output_token_s(self) -> float | None:
        """The mean behind the first delivery; None when all came at once."""
        behind = self.output_tokens - self.token_counts[0]
        return (self.token_times_s[-1] - self.token_times_s[0]) / behind if behind else None

    @property
    def inter_token_latencies_s(self) -> tuple[float, ...]:
        """Gaps between deliveries: what a reader sees, whether one token comes or several."""
        return tuple(after - before for before, after in pairwise(self.token_times_s))

    @property
    def latency_s(self) -> float:
        return self.finished_s - self.sent_s


@dataclass(frozen=True, slots=True)
class WorkloadRun:
    """`occupancy` has (seconds since start, sequences running) samples; `batch_occupancy` is the mean over steps, 0 to 1.

    Both are empty, and `slots` is 0, for a server that does not tell its load. `failures` has one sentence a request that failed.
    `client_cpu_s` is the CPU time that this process used.
    """

    wall_s: float
    timings: tuple[RequestTiming, ...]
    batch_occupancy: float = 0.0
    slots: int = 0
    occupancy: tuple[tuple[float, int], ...] = ()
    failures: tuple[str, ...] = ()
    client_cpu_s: float = 0.0


@dataclass
class Tally:
    """How far a run has come; read it while it runs."""

    output_tokens: int = 0
    running: int = 0
    finished: int = 0
    failures: list[str] = field(default_factory=list)
    samples: list[tuple[float, int]] = field(default_factory=list)


async def run_workload(target: Target, workload: Workload, on_progress: Callable[[Tally], None]) -> WorkloadRun:
    """Sends all requests when they are due, in order, and reads their output to the end; one that fails leaves the others alone.

    `on_progress` is called with each delivery and each sample. The server should have nothing else to do: occupancy is its own.
    Raises the error of a server that cannot tell its load though it should.
    """
    before = await target.load()
    tally = Tally()
    over = asyncio.Event()
    cpu_s, start_s = time.process_time(), time.perf_counter()
    sampler = asyncio.create_task(_sample(target, before, tally, start_s, on_progress, over))
    try:
        async with asyncio.TaskGroup() as group:
            tasks: dict[int, asyncio.Task[RequestTiming | None]] = {}
            for place in sorted(range(len(workload.arrivals)), key=lambda place: workload.arrivals[place].at_s):
                await _until(start_s + workload.arrivals[place].at_s)
                sent = _run_one(target, workload.arrivals[place], workload.prompts[place], start_s, tally, on_progress)
                tasks[place] = group.create_task(sent)
        wall_s, cpu_s = time.perf_counter() - start_s, time.process_time() - cpu_s
    finally:
        over.set()
        await sampler
    after = await target.load()
    return WorkloadRun(
        wall_s=wall_s,
        timings=tuple(timing for _, task in sorted(tasks.items()) if (timing := task.result()) is not None),
        batch_occupancy=_batch_occupancy(before, after) if before and after else 0.0,
        slots=after.max_num_seqs if after else 0,
        occupancy=tuple(tally.samples),
        failures=tuple(tally.failures),
        client_cpu_s=cpu_s,
    )


async def _until(due_s: float) -> None:
    """At once if it is past: requests that are due together are sent in their order, in which timers of their own would not end."""
    # A timer counts from when the event loop last looked at the clock, so on a busy machine it may end early by more than a tick.
    while (wait_s := due_s - time.perf_counter()) > 0:  # noqa: ASYNC110  # nothing happens that an event could tell
        await asyncio.sleep(wait_s + _TIMER_TICK_S)


async def _run_one(
    target: Target,
    arrival: Arrival,
    prompt: Sequence[int],
    start_s: float,
    tally: Tally,
    on_progress: Callable[[Tally], None],
) -> RequestTiming | None:
    sent_s = time.perf_counter() - start_s
    times_s: list[float] = []
    counts: list[int] = []
    try:
        async for count in target.generate(prompt, arrival.output_tokens):
            times_s.append(time.perf_counter() - start_s)
            counts.append(count)
            tally.output_tokens += count
            on_progress(tally)
        if sum(counts) != arrival.output_tokens:
            raise TargetError(f"{arrival.output_tokens} tokens were asked for, {sum(counts)} came")
    except (TokenmillError, TargetError) as error:
        tally.failures.append(str(error))
        return None
    tally.finished += 1
    return RequestTiming(len(prompt), sent_s, time.perf_counter() - start_s, tuple(times_s), tuple(counts))


async def _sample(
    target: Target, load: Load | None, tally: Tally, start_s: float, on_progress: Callable[[Tally], None], over: asyncio.Event
) -> None:
    """Begins with what the `load` was just before: to ask again would be in the way of the first requests."""
    while load is not None:
        tally.running = load.num_requests_running
        tally.samples.append((time.perf_counter() - start_s, tally.running))
        on_progress(tally)
        with suppress(TimeoutError):
            await asyncio.wait_for(over.wait(), _SAMPLE_INTERVAL_S)
        if over.is_set():
            return
        load = await target.load()


def _batch_occupancy(before: Load, after: Load) -> float:
    """The scheduler gives the mean since its start; the difference of the sums is this run's."""
    steps = after.steps - before.steps
    total = after.batch_occupancy * after.steps - before.batch_occupancy * before.steps
    return total / steps if steps else 0.0
