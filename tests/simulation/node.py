"""A scheduler process in virtual time: all of it but the gRPC server, wired as `server.py` does, over a ledger in memory.

It can be cut off from the database, as one that stands still; it can crash, also between a commit and its telling, and stop in
order.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from tokenmill_scheduler.core.backlog import QueueLimits
from tokenmill_scheduler.core.scheduler import Scheduler, SchedulerConfig
from tokenmill_scheduler.desk.errors import Unavailable
from tokenmill_scheduler.executors import Executors
from tokenmill_scheduler.lease import LeaseKeeper, take_lease
from tokenmill_scheduler.ledger.errors import LedgerUnavailable
from tokenmill_scheduler.ledger.records import Estate, Lease, Outcome, Record, Submission
from tokenmill_scheduler.loop import Loop
from tokenmill_scheduler.loop_desk import LoopDesk
from tokenmill_scheduler.models import Models
from tokenmill_scheduler.recovery import take_up
from tokenmill_scheduler.session import SessionLimits

from tests.fakes.memory_ledger import MemoryLedger
from tests.simulation.virtual import unix_s

LEASE_S = 1.0
GRACE_S = 3.0
CONFIG = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16)
T = TypeVar("T")
OnDurable = Callable[[list[Outcome]], None]


class Door:
    """A scheduler's way to the database. While it is `shut`, every call is LedgerUnavailable."""

    def __init__(self, ledger: MemoryLedger) -> None:
        self._ledger = ledger
        self.shut = False

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._ledger, name)

        def call(*args: Any, **options: Any) -> Any:
            if self.shut:
                raise LedgerUnavailable("the database cannot be reached")
            return method(*args, **options)

        return call


class LaggingWriter:
    """A `RecordWriter` that commits a little later all that has gathered until then, and again when the database is away."""

    def __init__(self, door: Door, rng: random.Random, failed: Callable[[Exception], None]) -> None:
        self.saturated = False
        self.outage: LedgerUnavailable | None = None
        self.lease: Lease | None = None
        self._door = door
        self._rng = rng
        self._failed = failed
        self._waiting: list[tuple[Sequence[Record], OnDurable | None, asyncio.Future[Outcome] | None]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def backlog(self) -> int:
        return len(self._waiting)

    def append(self, records: Sequence[Record], on_durable: OnDurable | None = None) -> None:
        self._put(records, on_durable, None)

    async def submit(self, submission: Submission, *beside: Record) -> Outcome:
        if self.outage is not None or self._closed:
            raise LedgerUnavailable("the database is away")
        answer: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._put([submission, *beside], lambda outcomes: answer.set_result(outcomes[0]), answer)
        return await answer

    def _put(self, records: Sequence[Record], on_durable: OnDurable | None, answer: asyncio.Future[Outcome] | None) -> None:
        self._waiting.append((records, on_durable, answer))
        if self._timer is None and not self._closed:
            self._timer = asyncio.get_running_loop().call_later(self._rng.choice([0, 0.002, 0.002, 0.03, 0.3]), self.commit)

    def commit(self, *, tell: bool = True) -> None:
        """Not `tell`: the process dies before anybody hears of it."""
        self._timer = None
        if not self._waiting:
            return
        try:
            outcomes = iter(self._door.write([record for records, _, _ in self._waiting for record in records], self.lease))
        except LedgerUnavailable as error:
            self.outage = error
            self._timer = asyncio.get_running_loop().call_later(0.1, self.commit)
            return
        except Exception as error:
            self._lose(error)
            self._failed(error)
            return
        self.outage = None
        written, self._waiting = self._waiting, []
        for records, on_durable, answer in written if tell else ():
            told = [next(outcomes) for _ in records]
            if on_durable is not None and (answer is None or not answer.done()):
                on_durable(told)

    def close(self) -> None:
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._lose(LedgerUnavailable("the scheduler stops"))

    def _lose(self, error: Exception) -> None:
        for _, _, answer in self._waiting:
            if answer is not None and not answer.done():
                answer.set_exception(error)
        self._waiting = []


class Node:
    """Made anew for each process. `failure` is what ended it, if that was not its end from outside."""

    def __init__(self, name: str, told: Sequence[str], ledger: MemoryLedger, rng: random.Random) -> None:
        self.name = name
        self.told = told
        self.door = Door(ledger)
        self.alive = True
        self.died: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.writer = LaggingWriter(self.door, rng, lambda error: self.loop.fail(error))
        models = Models()
        scheduler = Scheduler(CONFIG)
        self.loop = Loop(scheduler, self.writer, lambda model: models.find(model).text, GRACE_S, unix_s)
        limits = QueueLimits(10_000)
        # The door is a ledger to whoever asks it.
        door: Any = self.door
        self.desk = LoopDesk(limits, self.loop, models, door, self.writer, announce_s=GRACE_S / 3, patience_s=LEASE_S)
        gone = self.desk.handovers.executor_gone
        self.executors = Executors(told, self.loop, models, door, SessionLimits(), 1 << 20, lambda: None, None, gone)
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Raises LedgerUnavailable."""
        door: Any = self.door
        self.lease, estate = take_lease(door, self.name, LEASE_S, alone=False, told=self.told)
        self.writer.lease = self.lease
        self.desk.open(self.lease)
        await self.desk.handovers.look()
        take_up(self.loop, estate.requests)
        self.executors.start(self.lease)
        self.executors.inherit([address for _, address in estate.executors])
        clock = asyncio.get_running_loop().time
        self.keeper = LeaseKeeper(door, self.lease, LEASE_S, lambda: not self.loop.failure.done(), clock)
        desk, relay = self.desk, self.desk.relay
        listening = relay.listen(self.lease, lambda: bool(self.keeper.peers), desk.obey)
        for work in (self._keep(), self.loop.tick(), desk.followers.run(), desk.handovers.watch(), relay.send(), listening):
            self._keep_at(work)

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(self.keeper.interval_s)
            if (estate := self.keeper.step()) is not None:
                # News from another thread.
                asyncio.get_running_loop().call_soon(self._inherit, estate)

    def _inherit(self, estate: Estate) -> None:
        if self.alive and not self.loop.failure.done():
            self.executors.inherit([address for _, address in estate.executors])
            take_up(self.loop, estate.requests, self.desk.followers.hand_over)

    def _keep_at(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        task.add_done_callback(self._work_ended)
        self._tasks.append(task)

    def _work_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and self.alive and (error := task.exception()) is not None:
            self.loop.fail(error)

    @property
    def failure(self) -> BaseException | None:
        return self.loop.failure.exception() if self.loop.failure.done() else None

    def mend(self) -> None:
        """It reaches the database again."""
        self.door.shut = not self.alive

    async def crash(self, *, between: bool = False) -> None:
        """`between`: after a commit, before its telling."""
        if between:
            self.writer.commit(tell=False)
        self.alive = False
        self.died.set_result(None)
        self.door.shut = True
        reason = Unavailable("the scheduler died", 0.1)
        self.loop.fail(reason)
        assert self.failure is not None
        self.desk.close()
        self.desk.close_streams(reason)
        self.writer.close()
        tasks = [*self._tasks, *self.executors._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def stop(self) -> None:
        """In order: its lease is given up. Raises LedgerUnavailable, and has then crashed."""
        self.desk.close()
        await self.executors.leave(0.1)
        self.writer.commit()
        try:
            self.door.give_up_lease(self.lease)
        finally:
            await self.crash()


async def call(node: Node, asked: Coroutine[Any, Any, T]) -> T:
    """Raises Unavailable when the process dies before it has answered."""
    answering = asyncio.ensure_future(asked)
    try:
        ends: list[asyncio.Future[Any]] = [answering, node.died]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            raise Unavailable("the scheduler died", 0.1)
        return answering.result()
    finally:
        answering.cancel()


def drives(node: Node) -> list[str]:
    """Ids of the requests that its core has."""
    return list(node.loop.scheduler._roster.requests)
