"""The writer thread: order, group commit, outages, failures and stopping."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence

import pytest
from tokenmill_scheduler.core.effects import TokensGenerated
from tokenmill_scheduler.ledger import writer as writer_module
from tokenmill_scheduler.ledger.errors import LedgerConflict, LedgerUnavailable
from tokenmill_scheduler.ledger.records import Lease, Outcome, Record
from tokenmill_scheduler.ledger.sql import SqlLedger
from tokenmill_scheduler.ledger.writer import LedgerWriter

from tests.fakes.ledger_records import done, prefill, run_to_decode, submission, tokens
from tests.fakes.memory_ledger import MemoryLedger


class GatedLedger(MemoryLedger):
    """Waits before each write until the gate is opened; remembers what each transaction was given."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.entered = threading.Event()
        self.batches: list[list[Record]] = []

    def write(self, records: Sequence[Record], lease: Lease | None = None) -> list[Outcome]:
        self.entered.set()
        assert self.gate.wait(30)
        self.batches.append(list(records))
        return super().write(records, lease)


class FlakyLedger(MemoryLedger):
    """Is away for its first `failures` writes."""

    def __init__(self, failures: int) -> None:
        super().__init__()
        self.failures = failures
        self.failures_seen = 0
        self.refused = threading.Event()

    def write(self, records: Sequence[Record], lease: Lease | None = None) -> list[Outcome]:
        if self.failures:
            # Seen by the writer before the second refusal, at which this is set.
            if self.failures_seen:
                self.refused.set()
            self.failures_seen += 1
            self.failures -= 1
            raise LedgerUnavailable("away")
        return super().write(records, lease)


@pytest.fixture(autouse=True)
def fast_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "FIRST_RETRY_S", 0.001)
    monkeypatch.setattr(writer_module, "LONGEST_RETRY_S", 0.002)


def never(error: Exception) -> None:
    raise AssertionError(error)


async def test_submit_returns_when_it_is_durable(sql_ledger: SqlLedger) -> None:
    writer = LedgerWriter(sql_ledger, never)
    writer.start()
    assert await writer.submit(submission()) is Outcome.WRITTEN
    assert sql_ledger.find("a") is not None
    assert await writer.submit(submission()) is Outcome.JOINED
    assert await writer.submit(submission(digest=b"other")) is Outcome.CONFLICT
    assert await writer.close(30)


async def test_what_gathers_is_one_transaction_and_one_wake_up(monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = GatedLedger()
    writer = LedgerWriter(ledger, never)
    writer.start()
    told: list[tuple[str, list[Outcome]]] = []
    writer.append([submission("first")], lambda outcomes: told.append(("first", outcomes)))
    await asyncio.to_thread(ledger.entered.wait, 30)
    for name in ("a", "b", "a", "c"):
        writer.append([submission(name)], lambda outcomes, name=name: told.append((name, outcomes)))  # type: ignore[misc]
    assert (writer.backlog, told) == (5, [])
    assert writer.oldest_age_s() > 0
    wake_ups: list[object] = []
    loop = asyncio.get_running_loop()
    call = loop.call_soon_threadsafe

    def counted(function: Callable[..., object], *args: object) -> object:
        wake_ups.append(function)
        return call(function, *args)

    monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
    ledger.gate.set()
    assert await writer.close(30)
    assert [len(batch) for batch in ledger.batches] == [1, 4]
    # One for each of the two commits; the third says that the thread has ended.
    assert len(wake_ups) == 3
    written, joined = [Outcome.WRITTEN], [Outcome.JOINED]
    assert told == [("first", written), ("a", written), ("b", written), ("a", joined), ("c", written)]
    assert (writer.backlog, writer.oldest_age_s()) == (0, 0.0)


async def test_a_transaction_takes_no_more_than_its_limit() -> None:
    ledger = GatedLedger()
    writer = LedgerWriter(ledger, never, max_batch=3)
    writer.start()
    writer.append([submission("first")])
    await asyncio.to_thread(ledger.entered.wait, 30)
    for number in range(4):
        writer.append([submission(f"{number}a"), submission(f"{number}b")])
    writer.append([submission(f"long{number}") for number in range(5)])
    ledger.gate.set()
    assert await writer.close(30)
    assert [len(batch) for batch in ledger.batches] == [1, 2, 2, 2, 2, 5]


def may_wait(records: Sequence[Record]) -> bool:
    return isinstance(records[0], TokensGenerated)


async def test_what_may_wait_gathers_until_something_may_not() -> None:
    ledger = GatedLedger()
    ledger.gate.set()
    # An interval that never ends here.
    writer = LedgerWriter(ledger, never, interval_s=3600.0, may_wait=may_wait)
    writer.start()
    await writer.submit(submission())
    await writer.submit(submission("b"))
    told: list[int] = []
    writer.append([prefill()])
    for index in range(3):
        writer.append([tokens("a", index, index)], lambda _, index=index: told.append(index))  # type: ignore[misc]
    assert await writer.submit(submission("c")) is Outcome.WRITTEN
    assert told == [0, 1, 2]
    assert ledger.output("a").token_ids == (0, 1, 2)
    # Those who close do not wait either.
    writer.append([tokens("a", 3, 3)])
    assert await writer.close(30)
    assert ledger.output("a").token_ids == (0, 1, 2, 3)
    tokens_in = [sum(isinstance(record, TokensGenerated) for record in batch) for batch in ledger.batches]
    assert [count for count in tokens_in if count] in ([3, 1], [1, 2, 1], [2, 1, 1])


async def test_what_waits_is_written_when_the_interval_is_over() -> None:
    ledger = GatedLedger()
    writer = LedgerWriter(ledger, never, interval_s=0.02, may_wait=may_wait)
    writer.start()
    writer.append([submission()])
    await asyncio.to_thread(ledger.entered.wait, 30)
    written = asyncio.Event()
    writer.append([tokens("a", 0, 0)])
    writer.append([tokens("a", 1, 1)], lambda _: written.set())
    ledger.gate.set()
    await asyncio.wait_for(written.wait(), 30)
    assert [len(batch) for batch in ledger.batches] == [1, 2]
    assert await writer.close(30)


async def test_c73_an_outage_loses_nothing_and_keeps_the_order() -> None:
    ledger = FlakyLedger(failures=7)
    writer = LedgerWriter(ledger, never)
    writer.start()
    told: list[int] = []
    writer.append([submission()], lambda _: told.append(0))
    writer.append([prefill()], lambda _: told.append(1))
    for index in range(20):
        writer.append([tokens("a", index, index)], lambda _, index=index: told.append(2 + index))  # type: ignore[misc]
    assert await writer.close(30)
    assert told == list(range(22))
    assert ledger.output("a").token_ids == tuple(range(20))
    assert writer.outage is None


async def test_c73_submissions_are_refused_in_an_outage() -> None:
    ledger = FlakyLedger(failures=2**31)
    writer = LedgerWriter(ledger, never)
    writer.start()
    waiting = asyncio.ensure_future(writer.submit(submission()))
    await asyncio.to_thread(ledger.refused.wait, 30)
    with pytest.raises(LedgerUnavailable, match="away"):
        await writer.submit(submission("b"))
    ledger.failures = 0
    assert await waiting is Outcome.WRITTEN
    assert await writer.submit(submission("b")) is Outcome.WRITTEN
    assert await writer.close(30)


async def test_a_full_backlog_refuses_submissions_but_keeps_results() -> None:
    ledger = GatedLedger()
    run = MemoryLedger.write
    run(ledger, [submission("running"), prefill("running")])
    writer = LedgerWriter(ledger, never, max_backlog=2)
    writer.start()
    first = asyncio.ensure_future(writer.submit(submission()))
    await asyncio.sleep(0)
    assert not writer.saturated
    writer.append([tokens("running", 0, 5)])
    assert writer.saturated
    with pytest.raises(LedgerUnavailable, match="2 records wait"):
        await writer.submit(submission("b"))
    writer.append([tokens("running", 1, 6)])
    ledger.gate.set()
    assert await first is Outcome.WRITTEN
    assert await writer.close(30)
    assert not writer.saturated
    assert ledger.output("running").token_ids == (5, 6)


async def test_a_conflict_stops_the_writer_and_tells_its_owner() -> None:
    ledger = GatedLedger()
    failures: list[Exception] = []
    writer = LedgerWriter(ledger, failures.append)
    writer.start()
    told: list[object] = []
    writer.append([submission()], told.append)
    await asyncio.to_thread(ledger.entered.wait, 30)
    # In one transaction with the conflict: not written either.
    waiting = asyncio.ensure_future(writer.submit(submission("b")))
    await asyncio.sleep(0)
    writer.append([done()], told.append)
    ledger.gate.set()
    with pytest.raises(LedgerConflict):
        await waiting
    assert [type(failure) for failure in failures] == [LedgerConflict]
    assert told == [[Outcome.WRITTEN]]
    assert ledger.find("b") is None
    with pytest.raises(LedgerConflict):
        writer.append([submission("c")])
    with pytest.raises(LedgerConflict):
        await writer.submit(submission("c"))
    assert not await writer.close(30)


async def test_a_callback_that_raises_keeps_no_other_from_being_told() -> None:
    loop = asyncio.get_running_loop()
    reported: list[object] = []
    loop.set_exception_handler(lambda _, context: reported.append(context["exception"]))
    ledger = GatedLedger()
    writer = LedgerWriter(ledger, never)
    writer.start()
    told: list[object] = []
    mistake = RuntimeError("a bug")

    def fail(_: list[Outcome]) -> None:
        raise mistake

    writer.append([submission("a")], fail)
    writer.append([submission("b")], told.append)
    ledger.gate.set()
    assert await writer.close(30)
    assert (reported, told) == ([mistake], [[Outcome.WRITTEN]])


async def test_a_caller_that_stops_waiting_is_still_written() -> None:
    ledger = GatedLedger()
    writer = LedgerWriter(ledger, never)
    writer.start()
    waiting = asyncio.ensure_future(writer.submit(submission()))
    await asyncio.sleep(0)
    waiting.cancel()
    ledger.gate.set()
    assert await writer.close(30)
    assert ledger.find("a") is not None


async def test_closing_in_an_outage_gives_up_after_its_time() -> None:
    writer = LedgerWriter(MemoryLedger(unavailable=True), never)
    writer.start()
    waiting = asyncio.ensure_future(writer.submit(submission()))
    await asyncio.sleep(0)
    assert not await writer.close(0.01)
    with pytest.raises(LedgerUnavailable, match="stopped before"):
        await waiting
    with pytest.raises(LedgerUnavailable, match="stopping"):
        writer.append([submission()])


async def test_tokens_of_many_steps_arrive_whole(sql_ledger: SqlLedger) -> None:
    run_to_decode(sql_ledger)
    writer = LedgerWriter(sql_ledger, never)
    writer.start()
    seen: list[int] = []
    for index in range(500):
        # Each step is stored before it is told.
        writer.append([tokens("a", index, index)], lambda _, index=index: seen.append(index))  # type: ignore[misc]
        if index % 50 == 0:
            await asyncio.sleep(0.001)
    assert await writer.close(30)
    assert seen == list(range(500))
    assert sql_ledger.output("a").token_ids == tuple(range(500))
