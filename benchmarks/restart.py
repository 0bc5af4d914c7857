"""What a scheduler's death costs its streams: kill -9 with 20 of them open, a new process at once, seconds to their next tokens.

    python -m benchmarks.restart [--database sqlite|postgresql|both] [--model simulated] [--rounds 5] [executor flags ...]

Times are from the moment that the new process is started (exec). The scheduler's own stages are taken from its log, a stream's from
its client, which is the Python client with nothing changed, each with a connection of its own. The streams live through all rounds;
that each index comes once and in order is checked by the client. Writes a dated table to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import platform
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from tokenmill_client import AsyncClient, AsyncStream
from tokenmill_service.logs import configure_logs

from benchmarks.cpu_time import CpuTime
from benchmarks.tables import keep, today
from tests.fakes.postgres import postgres_server
from tests.fakes.processes import Processes, ServiceProcess, wait_serving

BAR_S = 2.0
MAX_TOKENS = 7_000
PROMPT_TOKENS = 50
# Streams run so long before each kill that all of them are in mid-sentence, and the first model's warming up is over.
UNDISTURBED_S = 2.0
WAIT_LIMIT_S = 120.0
SIMULATED = ("--simulated-step-ms", "5", "--max-model-len", "8192", "--num-gpu-blocks-override", "20000")
# Plans are logged at this level.
SCHEDULER_FLAGS = ("--log-format", "json", "--log-level", "debug")

# What the scheduler logs at the end of a stage, and how the table calls it.
STAGES = {
    "starting": "Python and imports",
    "lease taken": "database opened, requests read back",
    "listening": "listening",
    "executor joined": "first executor joined",
    "plan sent": "first plan sent",
}
ATTACHED = "stream attached again"
NEXT_TOKEN = "next token at the client"
CPU = "CPU time of the new process until the last stream goes on"


@dataclass
class Follower:
    """One client with one stream, and when (Unix seconds) its tokens came."""

    stream: AsyncStream
    came_s: list[float] = field(default_factory=list)

    async def read(self) -> None:
        async for _ in self.stream:
            self.came_s.append(time.time())


class TakenUp(logging.Handler):
    """When the client took up which stream again, as it logs itself."""

    def __init__(self) -> None:
        super().__init__()
        self.at_s: list[float] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "taken up again" in record.msg:
            self.at_s.append(record.created)


Figures = dict[str, list[float]]


async def measure(processes: Processes, database: str, executor: ServiceProcess, rounds: int, streams: int) -> Figures:
    """Seconds from the start of the new process, by stage, of all rounds."""
    taken_up = TakenUp()
    logger = logging.getLogger("tokenmill_client")
    logger.addHandler(taken_up)
    logger.setLevel(logging.DEBUG)
    figures: Figures = defaultdict(list)
    scheduler = await asyncio.to_thread(processes.scheduler, executor.address, flags=SCHEDULER_FLAGS, database=database)
    await wait_serving(scheduler.address)
    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(AsyncClient(scheduler.address)) for _ in range(streams)]
        followers = [Follower(_generate(client, number)) for number, client in enumerate(clients)]
        reading = [asyncio.create_task(follower.read()) for follower in followers]
        for _ in range(rounds):
            await asyncio.sleep(UNDISTURBED_S)
            taken_up.at_s.clear()
            scheduler.kill()
            log_begins = scheduler.log.stat().st_size
            started_s = time.time()
            scheduler = await asyncio.to_thread(processes.scheduler, executor.address, flags=SCHEDULER_FLAGS, database=database)
            await _all_go_on(followers, reading, started_s)
            figures[CPU].append(CpuTime.of(scheduler.pid).total)
            for stage, at_s in _stages(scheduler.log, log_begins).items():
                figures[stage].append(at_s - started_s)
            figures[ATTACHED] += [at_s - started_s for at_s in taken_up.at_s]
            figures[NEXT_TOKEN] += [_next(follower, started_s) - started_s for follower in followers]
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
    scheduler.stop()
    logger.removeHandler(taken_up)
    return figures


def _generate(client: AsyncClient, number: int) -> AsyncStream:
    prompt = [40 + (number * 31 + index) % 80 for index in range(PROMPT_TOKENS)]
    return client.generate(token_ids=prompt, max_tokens=MAX_TOKENS, ignore_eos=True, temperature=0.0, request_id=f"stream-{number}")


async def _all_go_on(followers: Sequence[Follower], reading: Sequence[asyncio.Task[None]], since_s: float) -> None:
    """Returns once each stream has brought a token of the new process."""
    async with asyncio.timeout(WAIT_LIMIT_S):
        while not all(follower.came_s[-1:] > [since_s] for follower in followers):
            for task in reading:
                if task.done():
                    raise AssertionError("a stream has ended") from task.exception()
            await asyncio.sleep(0.05)


def _next(follower: Follower, since_s: float) -> float:
    return next(at_s for at_s in follower.came_s if at_s > since_s)


def _stages(log: Path, begins: int) -> dict[str, float]:
    """Unix seconds of the first of each in what the process has logged."""
    found: dict[str, float] = {}
    with log.open() as file:
        file.seek(begins)
        for line in file:
            entry = json.loads(line)
            if (event := entry["event"]) in STAGES:
                found.setdefault(event, datetime.fromisoformat(entry["timestamp"]).timestamp())
    return found


def run(dialect: str, model: str, rounds: int, streams: int, executor_flags: Sequence[str]) -> Figures:
    with Processes() as processes, _database(dialect, processes.folder) as url:
        own = SIMULATED if model == "simulated" else ()
        executor = processes.executor("--model", model, *own, *executor_flags)
        asyncio.run(wait_serving(executor.address))
        return asyncio.run(measure(processes, url, executor, rounds, streams))


@contextlib.contextmanager
def _database(dialect: str, folder: Path) -> Iterator[str]:
    if dialect == "sqlite":
        yield f"sqlite:///{folder / 'restart.db'}"
        return
    with postgres_server(fsync=True) as server:
        yield server.url(server.create_database())


def table(results: dict[str, Figures], model: str, rounds: int, streams: int) -> str:
    rows = []
    # Ahead of what else a busy machine does, by `chrt`.
    ahead = "" if os.sched_getscheduler(0) == os.SCHED_OTHER else ", run ahead of it by `chrt -r 1`"
    bar = f"**{NEXT_TOKEN}** (bar: max ≤ {BAR_S:g})"
    for key, name in [*STAGES.items(), (ATTACHED, ATTACHED), (NEXT_TOKEN, bar), (CPU, CPU)]:
        cells = [f"{statistics.median(figures[key]):.2f} | {max(figures[key]):.2f}" for figures in results.values()]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(
        [
            f"# Restart of a killed scheduler, {model}, {today()}",
            "",
            f"`python -m benchmarks.restart`, {rounds} kills with {streams} open streams on each database, {os.cpu_count()} cores "
            f"({platform.machine()}), Python {platform.python_version()}, load {os.getloadavg()[0]:.1f} at the end{ahead}.",
            "",
            "Seconds from the start of the new process to the end of each stage.",
            "",
            f"| | {' | '.join(f'{name}, median | max' for name in results)} |",
            "|---|" + "---:|---:|" * len(results),
            *rows,
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--database", choices=("sqlite", "postgresql", "both"), default="both")
    parser.add_argument("--model", default="simulated", help="as the executor's --model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=20)
    arguments, executor_flags = parser.parse_known_args()
    configure_logs("console", "warning")
    dialects = ("sqlite", "postgresql") if arguments.database == "both" else (arguments.database,)
    results = {dialect: run(dialect, arguments.model, arguments.rounds, arguments.streams, executor_flags) for dialect in dialects}
    name = Path(arguments.model).stem
    report = table(results, name, arguments.rounds, arguments.streams)
    keep(f"restart-{name}", report)


if __name__ == "__main__":
    main()
