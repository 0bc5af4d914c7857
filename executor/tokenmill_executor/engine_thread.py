"""The one thread that uses the engine, and its clock of waiting and idling.

Must not know: gRPC, protobuf. Jobs are carried out one after another in the order they came; nothing polls.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import structlog
from prometheus_client import Metric

from tokenmill_executor.engine import Engine
from tokenmill_executor.interrupt import Interrupt
from tokenmill_executor.job_thread import JobThread
from tokenmill_executor.metrics import Metrics, Offload
from tokenmill_executor.records import Plan, Result, Standing
from tokenmill_executor.runner import DeviceLost
from tokenmill_executor.when_idle import WhenIdle
from tokenmill_executor.wire import ServiceTimes

log = structlog.get_logger(__name__)

T = TypeVar("T")
# Idle for so long, the engine is not likely to be wanted in the milliseconds that a look at all blocks takes.
_CHECK_AFTER_S = 2.0
# Longer than the event loop of a scheduler that is at work may leave it without a plan.
_POPULATE_AFTER_S = 0.1


@dataclass(frozen=True, slots=True)
class Answer:
    result: Result
    times: ServiceTimes


class EngineThread:
    """Methods are called on the event loop's thread; the futures they return are that loop's."""

    def __init__(self, check_after_s: float = _CHECK_AFTER_S) -> None:
        self.metrics = Metrics()
        self._thread = JobThread("engine")
        self._engine: Engine | None = None
        self._idle_since_s = time.perf_counter()
        self._lost: DeviceLost | None = None
        self._plans_begun = 0
        self._check = WhenIdle(check_after_s, self._activity, self._check_books)
        self._populate = WhenIdle(_POPULATE_AFTER_S, self._activity, self._begin_to_populate)
        # By jobs that cut the plan ahead of them short.
        self._interrupt = Interrupt()

    @property
    def loaded(self) -> bool:
        return self._engine is not None

    def run(self, job: Callable[[], T], cuts: bool = True) -> asyncio.Future[T]:
        """Carries out `job` behind all earlier ones. To cancel the future does not stop it.

        `cuts`: a plan in progress begins no further step, so that the job's turn comes sooner.
        """
        if cuts:
            self._interrupt.ask()
        return self._thread.run(self._cutting(job) if cuts else job)

    def _cutting(self, job: Callable[[], T]) -> Callable[[], T]:
        def begin() -> T:
            self._interrupt.heed()
            return job()

        return begin

    async def load(self, make_engine: Callable[[], Engine]) -> None:
        """Makes the engine on its own thread, so that the event loop goes on and a device context has one owner."""
        self._engine = await self.run(make_engine)
        self.metrics.blocks = self._engine.blocks
        self._populate.start()

    def carry_out(self, plan: Plan, wanted: Callable[[], bool], began: Callable[[Plan], None]) -> asyncio.Future[Answer | None]:
        """Queues a plan. When its turn comes it is left out, giving None, unless `wanted` still says so; `began` is told first.

        Both are called on the engine's thread.
        """
        arrived_s = time.perf_counter()
        # With no plan ahead whose steps it could wait for, what is under way is less urgent.
        cuts = not plan.after_all_steps or self.metrics.plans_queued == 0
        answer = self.run(lambda: self._carry_out(plan, wanted, began, arrived_s), cuts)
        self.metrics.plans_queued += 1
        self._plans_begun += 1
        answer.add_done_callback(self._answered)
        return answer

    def release_all(self) -> asyncio.Future[Standing]:
        """Forgets every sequence, once the step in progress is over. Fails if the device was lost: no session can be served."""
        standing = self.run(self._release_all)
        standing.add_done_callback(self._released)
        return standing

    async def close(self, timeout_s: float) -> bool:
        """Drops what waits, and says whether the job in progress was over within `timeout_s`."""
        self._check.close()
        self._populate.close()
        last = self.run(lambda: None)
        self._thread.close()
        done, _ = await asyncio.wait([last], timeout=timeout_s)
        return bool(done)

    def _answered(self, future: asyncio.Future[Answer | None]) -> None:
        self.metrics.plans_queued -= 1
        if not self.metrics.plans_queued:
            self._check.start()
            self._populate.start()
        if not future.cancelled() and future.exception() is None and (answer := future.result()) is not None:
            self.metrics.carried_out(answer.result, answer.times)

    def _released(self, future: asyncio.Future[Standing]) -> None:
        if not future.cancelled() and future.exception() is None:
            self.metrics.blocks = future.result().blocks

    def _activity(self) -> int | None:
        """Plans so far; None while one is under way."""
        return None if self.metrics.plans_queued else self._plans_begun

    def _check_books(self) -> None:
        """Once after each time of work, when the engine has had nothing to do for a while."""
        self.run(self._find_mistake, cuts=False).add_done_callback(self._checked)

    def _find_mistake(self) -> AssertionError | None:
        assert self._engine is not None
        try:
            self._engine.check()
        except AssertionError as error:
            return error
        return None

    def _checked(self, future: asyncio.Future[AssertionError | None]) -> None:
        if not future.cancelled() and (error := future.result()) is not None:
            self.metrics.integrity_failures += 1
            log.error("integrity check failed", exc_info=error)

    def _begin_to_populate(self) -> None:
        self.run(self._populate_until_asked, cuts=False).add_done_callback(self._populated)

    def _populate_until_asked(self) -> bool:
        """Whether there is more to do."""
        assert self._engine is not None
        while more := self._engine.populate_some():
            if self._interrupt.is_asked():
                break
        return more

    def _populated(self, future: asyncio.Future[bool]) -> None:
        if not future.cancelled() and future.result():
            self._populate.start()
        else:
            self._populate.close()

    def gather(self) -> list[Metric]:
        """The figures as they stand."""
        if self._engine is not None:
            self.metrics.evicted_blocks = self._engine.evicted_blocks
            if (tier := self._engine.host_tier) is not None:
                self.metrics.offload = Offload(tier.num_blocks, len(tier), tier.copied_out, tier.copied_in, tier.dropped)
        return self.metrics.families()

    def _carry_out(self, plan: Plan, wanted: Callable[[], bool], began: Callable[[Plan], None], arrived_s: float) -> Answer | None:
        if not wanted():
            return None
        assert self._engine is not None
        if self._lost is not None:
            raise self._lost
        began(plan)
        started_s = time.perf_counter()
        # A plan that came before the last one ended did not find the engine idle.
        times = ServiceTimes(queue_s=started_s - arrived_s, idle_s=max(0.0, arrived_s - self._idle_since_s))
        try:
            result = self._engine.carry_out(plan, self._interrupt)
        except DeviceLost as error:
            self._lost = error
            raise
        self._idle_since_s = time.perf_counter()
        return Answer(result, times)

    def _release_all(self) -> Standing:
        assert self._engine is not None
        if self._lost is not None:
            raise self._lost
        standing = self._engine.release_all()
        self._idle_since_s = time.perf_counter()
        return standing
