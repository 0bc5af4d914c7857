"""The end of what a scheduler has in hand, and what it says while it waits: the real loop, the real writer over a fake ledger."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, MutableMapping
from typing import Any

import pytest
from structlog.testing import capture_logs
from tokenmill_scheduler import shutdown
from tokenmill_scheduler.ledger.errors import LedgerUnavailable
from tokenmill_scheduler.ledger.records import Submission
from tokenmill_scheduler.ledger.writer import LedgerWriter
from tokenmill_scheduler.shutdown import finish_steps, finish_writing

from tests.fakes.calls import eventually
from tests.fakes.ledger_records import prefill
from tests.fakes.memory_ledger import MemoryLedger
from tests.fakes.shell import Shell, request

Log = list[MutableMapping[str, Any]]


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Iterator[Log]:
    """What is logged, on and on without a pause."""
    monkeypatch.setattr(shutdown, "FIRST_WORDS_S", 0.0)
    monkeypatch.setattr(shutdown, "NEXT_WORDS_S", 0.001)
    with capture_logs() as log:
        yield log


def waits(said: Log) -> Log:
    return [line for line in said if line["event"].startswith("waiting")]


async def said_again(said: Log) -> None:
    async def is_said() -> bool:
        return len(waits(said)) >= 5

    await eventually(is_said)


def never(error: Exception) -> None:
    raise AssertionError(error)


async def written_to(ledger: MemoryLedger) -> LedgerWriter:
    """One that has a record to write, and has been refused."""
    writer = LedgerWriter(ledger, never)
    writer.start()
    await writer.submit(Submission(request("a"), b""))
    ledger.unavailable = True
    writer.append([prefill()])

    async def is_refused() -> bool:
        return writer.outage is not None

    await eventually(is_refused)
    return writer


async def test_a_stop_says_what_the_database_is_waited_for(said: Log) -> None:
    ledger = MemoryLedger()
    writer = await written_to(ledger)
    stopping = asyncio.create_task(finish_writing(writer, time.monotonic() + 30))
    await said_again(said)
    ledger.unavailable = False
    await stopping
    assert {(line["event"], line["log_level"]) for line in said} == {("waiting for the database", "warning")}
    assert (said[0]["reason"], said[0]["backlog"]) == ("the database is away", 1)
    assert 0 < said[-1]["at_most_s"] <= 30
    assert len(ledger.transitions("a")) == 2


async def test_a_stop_gives_up_when_its_time_is_over(said: Log) -> None:
    writer = await written_to(MemoryLedger())
    await finish_writing(writer, time.monotonic() + 0.01)
    assert said[-1]["event"] == "not all could be written; it will be computed again"
    assert said[-1]["backlog"] == 1


async def test_a_stop_says_which_executors_are_waited_for(said: Log) -> None:
    shell = Shell.over(MemoryLedger())
    await shell.join()
    await shell.submit(request("a", max_tokens=100))
    stopping = asyncio.create_task(finish_steps(shell.loop, time.monotonic() + 30))
    await said_again(said)
    plans = len(shell.executor.plans)
    await shell.run_out()
    await stopping
    assert {(line["event"], *line["executors"]) for line in waits(said)} == {("waiting for steps in hand", "played")}
    assert len(shell.executor.plans) == plans, "no more were made"


async def test_a_stop_that_takes_a_moment_says_nothing(said: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutdown, "FIRST_WORDS_S", 30.0)
    shell = Shell.over(MemoryLedger())
    await shell.join()
    await finish_steps(shell.loop, time.monotonic() + 30)
    ledger = MemoryLedger()
    writer = await written_to(ledger)
    ledger.unavailable = False
    await finish_writing(writer, time.monotonic() + 30)
    assert said == []


async def test_a_loop_that_failed_is_waited_for_no_longer(said: Log) -> None:
    shell = Shell.over(MemoryLedger())
    await shell.join()
    await shell.submit(request("a"))
    shell.loop.fail(LedgerUnavailable("gone"))
    await finish_steps(shell.loop, time.monotonic())
    assert shell.loop.busy() == ["played"]
    shell.loop.failure.exception()
