"""How a scheduler ends what it has in hand: plans that are out come back, and what they brought is made durable.

Says what it waits for, and why. Must not know: requests, who told it to stop.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Protocol, TypeVar

import structlog

from tokenmill_scheduler.ledger.errors import LedgerUnavailable

T = TypeVar("T")

# What is done by then is no wait to speak of.
FIRST_WORDS_S = 0.2
NEXT_WORDS_S = 5.0

log = structlog.get_logger(__name__)


class Planning(Protocol):
    """`loop.Loop`, in production."""

    async def stop_planning(self) -> None: ...

    def busy(self) -> list[str]: ...


class Writing(Protocol):
    """`ledger.writer.LedgerWriter`, in production."""

    @property
    def outage(self) -> LedgerUnavailable | None: ...

    @property
    def backlog(self) -> int: ...

    async def close(self, timeout_s: float) -> bool: ...


async def finish_steps(loop: Planning, until_s: float) -> None:
    """Makes no more plans, and waits for those that are out, until `until_s` (monotonic) at most."""

    def say() -> None:
        log.info("waiting for steps in hand", executors=loop.busy(), at_most_s=_left(until_s))

    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(_wait_aloud(loop.stop_planning, say), until_s - time.monotonic())


async def finish_writing(writer: Writing, until_s: float) -> None:
    """Makes what has happened durable, until `until_s` (monotonic) at most."""

    def say() -> None:
        reason = "a write takes long" if writer.outage is None else str(writer.outage)
        log.warning("waiting for the database", reason=reason, backlog=writer.backlog, at_most_s=_left(until_s))

    if not await _wait_aloud(partial(writer.close, until_s - time.monotonic()), say):
        log.error("not all could be written; it will be computed again", backlog=writer.backlog)


async def _wait_aloud(work: Callable[[], Coroutine[Any, Any, T]], say: Callable[[], None]) -> T:
    task = asyncio.create_task(work())
    try:
        await asyncio.wait([task], timeout=FIRST_WORDS_S)
        while not task.done():
            say()
            await asyncio.wait([task], timeout=NEXT_WORDS_S)
        return await task
    finally:
        task.cancel()


def _left(until_s: float) -> float:
    return round(max(0.0, until_s - time.monotonic()), 1)
