"""Workloads: which requests are sent when, and the runner that sends them and takes the times.

Must not know: the command line, how figures are shown.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from tokenmill_client import AsyncClient
from tokenmill_client.records import Load

_SAMPLE_INTERVAL_S = 0.2
# Ids below are often special or rare bytes; a prompt of other ids is as good as any for what a step costs.
_FIRST_PLAIN_TOKEN_ID = 256


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """Sent `at_s` after the start; makes exactly `output_tokens`."""

    at_s: float
    prompt: tuple[int, ...]
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    requests: tuple[WorkloadRequest, ...]

    @property
    def output_tokens(self) -> int:
        return sum(request.output_tokens for request in self.requests)


def burst(
    vocab_size: int,
    *,
    count: int = 20,
    seed: int = 42,
    prompt_tokens: tuple[int, int] = (10, 100),
    output_tokens: tuple[int, int] = (20, 200),
) -> Workload:
    """All at once; lengths are drawn evenly from the ranges, both ends included. The same seed gives the same workload."""
    draw = random.Random(seed)
    lengths = [(draw.randint(*prompt_tokens), draw.randint(*output_tokens)) for _ in range(count)]
    first = min(_FIRST_PLAIN_TOKEN_ID, vocab_size - 1)
    requests = [
        WorkloadRequest(0.0, tuple(draw.randrange(first, vocab_size) for _ in range(length)), output) for length, output in lengths
    ]
    return Workload("burst", tuple(requests))


@dataclass(frozen=True, slots=True)
class RequestTiming:
    """In seconds since the workload's start."""

    prompt_tokens: int
    output_tokens: int
    sent_s: float
    first_token_s: float
    finished_s: float

    @property
    def time_to_first_token_s(self) -> float:
        return self.first_token_s - self.sent_s

    @property
    def latency_s(self) -> float:
        return self.finished_s - self.sent_s


@dataclass(frozen=True, slots=True)
class WorkloadRun:
    """`occupancy` has (seconds since start, sequences running) samples; `batch_occupancy` is the mean over steps, 0 to 1."""

    wall_s: float
    timings: tuple[RequestTiming, ...]
    batch_occupancy: float
    slots: int
    occupancy: tuple[tuple[float, int], ...]


@dataclass
class Tally:
    """How far a run has come; read it while it runs."""

    output_tokens: int = 0
    running: int = 0
    finished: int = 0
    samples: list[tuple[float, int]] = field(default_factory=list)


async def run_workload(client: AsyncClient, workload: Workload, on_progress: Callable[[Tally], None]) -> WorkloadRun:
    """Sends all requests and reads their streams to the end. Raises the first TokenmillError there is.

    `on_progress` is called with each delta and each sample. The scheduler should have nothing else to do: occupancy is its own.
    """
    before = await client.admin.get_load()
    tally = Tally()
    start_s = time.perf_counter()
    over = asyncio.Event()
    sampler = asyncio.create_task(_sample(client, tally, start_s, on_progress, over))
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_run_one(client, request, start_s, tally, on_progress)) for request in workload.requests]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from errors
    finally:
        wall_s = time.perf_counter() - start_s
        over.set()
        await sampler
    after = await client.admin.get_load()
    return WorkloadRun(
        wall_s=wall_s,
        timings=tuple(task.result() for task in tasks),
        batch_occupancy=_batch_occupancy(before, after),
        slots=after.max_num_seqs,
        occupancy=tuple(tally.samples),
    )


async def _run_one(
    client: AsyncClient, request: WorkloadRequest, start_s: float, tally: Tally, on_progress: Callable[[Tally], None]
) -> RequestTiming:
    await asyncio.sleep(max(0.0, start_s + request.at_s - time.perf_counter()))
    sent_s = time.perf_counter() - start_s
    first_token_s = 0.0
    stream = client.generate(
        token_ids=request.prompt, output="token_ids", max_tokens=request.output_tokens, ignore_eos=True, temperature=0
    )
    async with stream:
        async for delta in stream:
            if delta.token_count and not first_token_s:
                first_token_s = time.perf_counter() - start_s
            tally.output_tokens += delta.token_count
            on_progress(tally)
    tally.finished += 1
    return RequestTiming(
        prompt_tokens=len(request.prompt),
        output_tokens=stream.output.usage.output_tokens,
        sent_s=sent_s,
        first_token_s=first_token_s,
        finished_s=time.perf_counter() - start_s,
    )


async def _sample(
    client: AsyncClient, tally: Tally, start_s: float, on_progress: Callable[[Tally], None], over: asyncio.Event
) -> None:
    while not over.is_set():
        tally.running = (await client.admin.get_load()).num_requests_running
        tally.samples.append((time.perf_counter() - start_s, tally.running))
        on_progress(tally)
        with suppress(TimeoutError):
            await asyncio.wait_for(over.wait(), _SAMPLE_INTERVAL_S)


def _batch_occupancy(before: Load, after: Load) -> float:
    """The scheduler gives the mean since its start; the difference of the sums is this run's."""
    steps = after.steps - before.steps
    total = after.batch_occupancy * after.steps - before.batch_occupancy * before.steps
    return total / steps if steps else 0.0
