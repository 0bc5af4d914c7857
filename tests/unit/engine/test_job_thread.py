"""Jobs on a thread of their own, as an event loop sees them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from functools import partial

import pytest
from tokenmill_executor.job_thread import JobThread


@pytest.fixture
def thread() -> Iterator[JobThread]:
    thread = JobThread("jobs")
    yield thread
    thread.close()


async def test_jobs_are_carried_out_in_order_on_one_thread(thread: JobThread) -> None:
    seen: list[tuple[int, str]] = []

    def look(number: int) -> None:
        seen.append((number, threading.current_thread().name))

    await asyncio.gather(*[thread.run(partial(look, number)) for number in range(5)])
    assert seen == [(number, "jobs") for number in range(5)]


async def test_what_a_job_raises_is_raised_where_it_is_awaited_and_the_next_is_carried_out(thread: JobThread) -> None:
    def fail() -> None:
        raise OSError("no such device")

    failing, next_one = thread.run(fail), thread.run(lambda: 7)
    with pytest.raises(OSError, match="no such device"):
        await failing
    assert await next_one == 7


async def test_a_job_is_carried_out_though_nobody_waits_for_it_any_more(thread: JobThread) -> None:
    seen: list[str] = []
    thread.run(lambda: seen.append("carried out")).cancel()
    await thread.run(lambda: None)
    assert seen == ["carried out"]


def test_a_loop_that_is_closed_is_told_nothing(thread: JobThread) -> None:
    """And the thread serves the next one."""
    go_on = threading.Event()

    async def leave() -> None:
        thread.run(go_on.wait)

    async def come() -> int:
        job = thread.run(lambda: 7)
        go_on.set()
        return await job

    asyncio.run(leave())
    assert asyncio.run(come()) == 7
