"""The one thread that uses the engine, and its clock of waiting and idling.

Must not know: gRPC, protobuf. Jobs are carried out one after another in the order they came; nothing polls.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from prometheus_client import Metric

from tokenmill_executor.engine import Engine
from tokenmill_executor.metrics import Metrics
from tokenmill_executor.records import Plan, Result, Standing
from tokenmill_executor.runner import DeviceLost
from tokenmill_executor.wire import ServiceTimes

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Answer:
    result: Result
    times: ServiceTimes


class EngineThread:
    """Methods are called on the event loop's thread; the futures they return are that loop's."""

    def __init__(self) -> None:
        self.metrics = Metrics()
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")
        self._engine: Engine | None = None
        self._idle_since_s = time.perf_counter()
        self._lost: DeviceLost | None = None

    @property
    def loaded(self) -> bool:
        return self._engine is not None

    def run(self, job: Callable[[], T]) -> asyncio.Future[T]:
        """Carries out `job` behind all earlier ones. To cancel the future does not stop a job that has begun."""
        return asyncio.get_running_loop().run_in_executor(self._pool, job)

    async def load(self, make_engine: Callable[[], Engine]) -> None:
        """Makes the engine on its own thread, so that the event loop goes on and a device context has one owner."""
        self._engine = await self.run(make_engine)
        self.metrics.blocks = self._engine.blocks

    def carry_out(self, plan: Plan, wanted: Callable[[], bool], began: Callable[[Plan], None]) -> asyncio.Future[Answer | None]:
        """Queues a plan. When its turn comes it is left out, giving None, unless `wanted` still says so; `began` is told first.

        Both are called on the engine's thread.
        """
        arrived_s = time.perf_counter()
        answer = self.run(lambda: self._carry_out(plan, wanted, began, arrived_s))
        self.metrics.plans_queued += 1
        answer.add_done_callback(self._answered)
        return answer

    def release_all(self) -> asyncio.Future[Standing]:
        """Forgets every sequence, once the step in progress is over. Fails if the device was lost: no session can be served."""
        standing = self.run(self._release_all)
        standing.add_done_callback(self._released)
        return standing

    async def close(self, timeout_s: float) -> bool:
        """Drops what waits, and says whether the job in progress was over within `timeout_s`."""
        last = self.run(lambda: None)
        self._pool.shutdown(wait=False)
        done, _ = await asyncio.wait([last], timeout=timeout_s)
        return bool(done)

    def _answered(self, future: asyncio.Future[Answer | None]) -> None:
        self.metrics.plans_queued -= 1
        if not future.cancelled() and future.exception() is None and (answer := future.result()) is not None:
            self.metrics.carried_out(answer.result, answer.times)

    def _released(self, future: asyncio.Future[Standing]) -> None:
        if not future.cancelled() and future.exception() is None:
            self.metrics.blocks = future.result().blocks

    def gather(self) -> list[Metric]:
        """The figures as they stand."""
        if self._engine is not None:
            self.metrics.evicted_blocks = self._engine.evicted_blocks
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
            result = self._engine.carry_out(plan)
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
