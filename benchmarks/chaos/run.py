"""One run: start everything, let clients work while faults befall the service, stop the faults, and see that all ends well."""

from __future__ import annotations

import asyncio
import math
import random
import time
from bisect import bisect
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from benchmarks.chaos.audit import Stored, Violation, audit
from benchmarks.chaos.clients import Clients, draw_ask
from benchmarks.chaos.faults import Fault
from benchmarks.chaos.sent import Book
from benchmarks.chaos.stored import count_unfinished, read_stored
from benchmarks.chaos.system import Befell, System
from benchmarks.chaos.victims import open_database
from tests.fakes.processes import Processes

# Once the faults are over, all must have ended within this.
SETTLE_LIMIT_S = 120.0
_LOOK_S = 0.2


@dataclass(frozen=True, slots=True)
class Options:
    database: str
    seed: int
    streams: int
    max_tokens: int
    faults: tuple[Fault, ...]


@dataclass(frozen=True)
class Outcome:
    """`settled_s`: from the last fault's end until every client had its request's end. `fenced`: schedulers that another took over
    from. Times are by the clock of the run.
    """

    options: Options
    book: Book
    befell: list[Befell]
    violations: list[Violation]
    stored: dict[str, Stored]
    wall_s: float
    settled_s: float
    fenced: int
    logs: dict[str, str] = field(default_factory=dict)


Watch = Callable[[System, Book], Coroutine[Any, Any, None]]


async def run(options: Options, watch: Watch | None = None) -> Outcome:
    """`watch` runs beside it, for whoever looks on."""
    with Processes() as processes, open_database(options.database, processes) as database:
        started_s = time.monotonic()

        def clock() -> float:
            return time.monotonic() - started_s

        book = Book(clock)
        system = System(processes, database, clock)
        watching = asyncio.create_task(watch(system, book)) if watch is not None else None
        try:
            await system.start()
            clients = Clients(system.address, options.seed, options.streams, options.max_tokens, book)
            working = asyncio.create_task(clients.run())
            await _first_tokens(options, book)
            await _befall(options, system, book)
            over_s = clock()
            clients.leave()
            await _settle(working, database.url)
            settled_s = clock() - over_s
            trouble = await system.trouble_at_idle()
        finally:
            if watching is not None:
                watching.cancel()
            await system.close()
        stored = await asyncio.to_thread(read_stored, database.url)
        violations = audit(book.requests, stored)
        violations += [Violation("crashes", "", crash) for crash in system.crashes]
        if trouble:
            violations.append(Violation("not idle", "", trouble))
        logs = {path.stem: path.read_text(errors="replace") for path in sorted(processes.folder.glob("*.log"))}
        return Outcome(options, book, system.befell, violations, stored, clock(), settled_s, system.fenced, logs)


async def _first_tokens(options: Options, book: Book) -> None:
    """Until every client is being served: faults are to strike streams, not queues alone."""
    async with asyncio.timeout(SETTLE_LIMIT_S):
        while sum(bool(sent.tokens) for sent in book.requests) < options.streams:  # noqa: ASYNC110 (for one look at the start)
            await asyncio.sleep(_LOOK_S)


async def _befall(options: Options, system: System, book: Book) -> None:
    rng = random.Random(f"{options.seed}/faults")
    start_s = book.clock()

    async def one(number: int, fault: Fault) -> None:
        ask = draw_ask(rng, f"killed-{number}", options.max_tokens, detached=False)
        await asyncio.sleep(max(0.0, start_s + fault.at_s - book.clock()))
        if fault.kills_client:
            book.send(ask).abandoned = True
        await system.befall(fault, ask)

    async with asyncio.TaskGroup() as faults:
        for number, fault in enumerate(options.faults):
            faults.create_task(one(number, fault))


async def _settle(working: asyncio.Task[None], url: str) -> None:
    """Until all has ended, or for SETTLE_LIMIT_S: what then has not is found by the audit."""
    with suppress(TimeoutError):
        async with asyncio.timeout(SETTLE_LIMIT_S):
            await working
            # Requests whose clients have left.
            while await asyncio.to_thread(count_unfinished, url):  # noqa: ASYNC110 (the database tells nobody)
                await asyncio.sleep(_LOOK_S)


@dataclass
class Waits:
    """How long streams in mid-sentence waited for their next token, and how many of them another fault befell meanwhile."""

    seconds: list[float] = field(default_factory=list)
    cut_short: int = 0

    def __iadd__(self, other: Waits) -> Waits:
        self.seconds += other.seconds
        self.cut_short += other.cut_short
        return self


def next_token_waits(fault: Befell, befell: Sequence[Befell], book: Book) -> Waits:
    """Of each stream that had begun when the fault was healed, from then on: a request in the queue waits for others' ends."""
    waits, healed_s = Waits(), fault.healed_s
    quiet_until_s = min((other.from_s for other in befell if other.from_s > healed_s), default=math.inf)
    for sent in book.requests:
        had = bisect(sent.came_s, healed_s)
        if 0 < had < len(sent.came_s):
            if sent.came_s[had] < quiet_until_s:
                waits.seconds.append(sent.came_s[had] - healed_s)
            else:
                waits.cut_short += 1
    return waits


def left_quiet(fault: Befell, befell: Sequence[Befell]) -> bool:
    """No other fault was under way when this one was healed: what comes next is its own doing."""
    return not any(other.from_s < fault.healed_s < other.healed_s for other in befell if other is not fault)
