"""A thread that carries out jobs one after another, for an event loop. Must not know: what the jobs are.

concurrent.futures does this with a future of its own beside the event loop's, their locks and a count of idle threads: half of what
the event loop spends on a job, which is time that a model on the same cores misses.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

T = TypeVar("T")
# A job, the event loop that asked for it, and where that hears of it.
_Job = tuple[Callable[[], Any], asyncio.AbstractEventLoop, asyncio.Future[Any]]


class JobThread:
    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        Thread(target=self._work, name=name, daemon=True).start()

    def run(self, job: Callable[[], T]) -> asyncio.Future[T]:
        """Carries out `job` behind all earlier ones, also when the future, which is the running event loop's, is cancelled."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._jobs.put((job, loop, future))
        return future

    def close(self) -> None:
        """The thread ends behind the jobs it has; it is given no more."""
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            _carry_out(*job)
            # What it holds on to, or has made, may be large: not until the next one comes.
            del job


def _carry_out(job: Callable[[], Any], loop: asyncio.AbstractEventLoop, future: asyncio.Future[Any]) -> None:
    try:
        result = job()
    except BaseException as error:
        _tell(loop, future, future.set_exception, error)
    else:
        _tell(loop, future, future.set_result, result)


def _tell(loop: asyncio.AbstractEventLoop, future: asyncio.Future[Any], settle: Callable[[Any], None], outcome: object) -> None:
    def told() -> None:
        if not future.cancelled():
            settle(outcome)

    with suppress(RuntimeError):  # nobody is there any more: the loop is closed
        loop.call_soon_threadsafe(told)
