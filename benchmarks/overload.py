"""Three times more work than the service can do, with the overload controller and without: who is served, how soon, what becomes of
the rest. On the real scheduler with a simulated executor.

    python -m benchmarks.overload [--seconds 60] [--times 3] [--output FILE]

A tenth of the arrivals is real-time, a fifth batch, the rest standard; all are of one shape, so the capacity is known beforehand.
Refused requests do not come again. Prints a table and writes it as markdown. `tests/e2e/test_overload.py` runs it for some seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import numpy as np
from tokenmill_client import AsyncClient, Lane, Output, RequestState
from tokenmill_client.errors import ResourceExhausted
from tokenmill_client.records import RequestInfo

from benchmarks.tables import table_path, today
from tests.fakes.processes import Processes

PROMPT = [40, 50]
# A real-time request after each four and before each five others, and so on: every lane's arrivals are spread evenly.
_TENTH = [Lane.STANDARD, Lane.BATCH, Lane.STANDARD, Lane.STANDARD, Lane.REAL_TIME]
_TENTH += [Lane.STANDARD, Lane.BATCH, Lane.STANDARD, Lane.STANDARD, Lane.STANDARD]


@dataclass(frozen=True, slots=True)
class Load:
    """`slots` sequences a step of `step_ms` make `tokens` each: so many requests a second, and `times` as many arrive."""

    seconds: float
    times: float = 3.0
    slots: int = 8
    step_ms: int = 50
    tokens: int = 8

    @property
    def capacity(self) -> float:
        """Requests a second."""
        return self.slots * 1000 / (self.step_ms * self.tokens)

    @property
    def lanes(self) -> list[Lane]:
        """Of all arrivals, in order."""
        count = round(self.seconds * self.times * self.capacity)
        return [_TENTH[number % len(_TENTH)] for number in range(count)]


@dataclass(slots=True)
class Run:
    """`accepted` has the lane of each request that was; `refused` the lane and the delay that was asked for; `stages` those seen
    every tenth of a second, from the start until nothing is held back any more, and `changes` how many moves from one to the next
    there had been by then. `ttft_s` is a real-time client's."""

    accepted: dict[str, Lane] = field(default_factory=dict)
    refused: list[tuple[Lane, float | None]] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    stages: list[int] = field(default_factory=list)
    changes: list[int] = field(default_factory=list)
    outputs: dict[str, Output] = field(default_factory=dict)
    ended: dict[str, RequestInfo] = field(default_factory=dict)
    # When something was last seen held back, and the last request arrived, on one clock; and from then until all had ended.
    held_back_s: float = 0.0
    last_s: float = 0.0
    drained_s: float = 0.0


async def overload(load: Load, processes: Processes, *flags: str, name: str = "scheduler") -> Run:
    """Starts the services with these flags, puts the load on them and waits until all is as before."""
    executor = processes.executor("--simulated-step-ms", str(load.step_ms), name=f"{name}-executor")
    scheduler = processes.scheduler(executor.address, flags=("--max-num-seqs", str(load.slots), *flags), name=name)
    run, over = Run(), asyncio.Event()
    async with AsyncClient(scheduler.address) as client:
        await client.wait_ready()
        watching = asyncio.create_task(_watch(client, run, over))
        await _arrive(client, run, load)
        run.last_s = time.monotonic()
        for request_id in run.accepted:
            run.outputs[request_id] = await client.attach(request_id).result()
            run.ended[request_id] = (await client.get_request(request_id)).info
        run.drained_s = time.monotonic() - run.last_s
        over.set()
        await watching
    scheduler.stop()
    executor.stop()
    return run


async def _arrive(client: AsyncClient, run: Run, load: Load) -> None:
    """Arrivals evenly spread over the time; returns once all have been answered."""
    began_s, lanes = time.monotonic(), load.lanes
    arrivals = []
    for number, lane in enumerate(lanes):
        await asyncio.sleep(max(0.0, began_s + number * load.seconds / len(lanes) - time.monotonic()))
        arrivals.append(asyncio.create_task(_submit(client, run, load, f"r{number}", lane)))
    await asyncio.gather(*arrivals)


async def _submit(client: AsyncClient, run: Run, load: Load, request_id: str, lane: Lane) -> None:
    """Somebody waits for a real-time request's output as it comes; others are submitted and fetched later."""
    try:
        if lane is Lane.REAL_TIME:
            began_s = time.monotonic()
            stream = client.generate(token_ids=PROMPT, max_tokens=load.tokens, seed=1, lane=lane, request_id=request_id)
            await anext(aiter(stream))
            run.ttft_s.append(time.monotonic() - began_s)
            run.accepted[request_id] = lane
            await stream.result()
        else:
            await client.submit(token_ids=PROMPT, max_tokens=load.tokens, seed=1, lane=lane, request_id=request_id)
            run.accepted[request_id] = lane
    except ResourceExhausted as error:
        run.refused.append((lane, error.retry_delay_s))


async def _watch(client: AsyncClient, run: Run, over: asyncio.Event) -> None:
    while not (over.is_set() and run.stages[-1] == 0):
        load = await client.admin.get_load()
        run.stages.append(load.overload_stage)
        run.changes.append(load.overload_changes)
        run.held_back_s = time.monotonic() if run.stages[-1] else run.held_back_s
        await asyncio.sleep(0.1)


# ---- the table -----------------------------------------------------------------------------------------------------------------


def table(load: Load, runs: dict[str, Run], target_s: float, queue_delay_s: float) -> str:
    lines = [
        f"# Overload, {today()}",
        "",
        f"{load.times:g} × the capacity of {load.capacity:g} requests a second for {load.seconds:g} s, then nothing "
        f"({load.slots} sequences, steps of {load.step_ms} ms, {load.tokens} tokens a request; simulated executor). Target for the "
        f"first token of real-time requests {target_s:g} s, mark for the standard lane's wait {queue_delay_s:g} s; policy fcfs, "
        f"lanes as they are by default. Python {platform.python_version()}, {platform.machine()}, a busy machine.",
        "",
        "| controller | lane | arrived | accepted | refused | done | first token p50 / p99 / most, s | end p50 / p99, s |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
        *[_lane_line(name, run, lane, load) for name, run in runs.items() for lane in (Lane.REAL_TIME, Lane.STANDARD, Lane.BATCH)],
        "",
        "| controller | highest stage | accepted and not done | delays asked for, s | drained, s after | stage 0, s after |",
        "|---|---:|---:|---:|---:|---:|",
        *[_run_line(name, run) for name, run in runs.items()],
    ]
    return "\n".join(lines) + "\n"


def _lane_line(name: str, run: Run, lane: Lane, load: Load) -> str:
    infos = [info for info in run.ended.values() if info.lane is lane]
    first = [_between(info.submitted_at, info.first_token_at) for info in infos]
    end = [_between(info.submitted_at, info.finished_at) for info in infos]
    cells = (
        name,
        lane.name.lower().replace("_", "-"),
        f"{load.lanes.count(lane):,}",
        f"{len(infos):,}",
        f"{sum(refused is lane for refused, _ in run.refused):,}",
        f"{sum(info.state is RequestState.DONE for info in infos):,}",
        f"{_quantile(first, 50)} / {_quantile(first, 99)} / {_quantile(first, 100)}",
        f"{_quantile(end, 50)} / {_quantile(end, 99)}",
    )
    return f"| {' | '.join(cells)} |"


def _run_line(name: str, run: Run) -> str:
    delays = [delay_s for _, delay_s in run.refused if delay_s is not None]
    undone = sum(info.state is not RequestState.DONE for info in run.ended.values())
    asked = f"{min(delays):.1f} to {max(delays):.1f}" if delays else "none"
    return (
        f"| {name} | {max(run.stages)} | {undone} | {asked} | {run.drained_s:.1f} | {max(0.0, run.held_back_s - run.last_s):.1f} |"
    )


def _between(start: datetime | None, end: datetime | None) -> float:
    assert start is not None, "it was submitted"
    assert end is not None, "it has ended"
    return (end - start).total_seconds()


def _quantile(values: Sequence[float], percent: float) -> str:
    return f"{np.percentile(values, percent):.2f}" if values else "–"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--times", type=float, default=3.0, help="arrivals over capacity")
    parser.add_argument("--output", type=Path, default=table_path("overload"))
    options = parser.parse_args()
    load, target_s, delay_s = Load(options.seconds, options.times), 1.0, 2.0
    flags = ("--ttft-target", f"{target_s}", "--overload-queue-delay", f"{delay_s}")
    with Processes() as processes:
        runs = {
            name: asyncio.run(overload(load, processes, *flags, flag, name=name))
            for name, flag in (("on", "--overload-control"), ("off", "--no-overload-control"))
        }
    text = table(load, runs, target_s, delay_s)
    print(text)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(text)


if __name__ == "__main__":
    main()
