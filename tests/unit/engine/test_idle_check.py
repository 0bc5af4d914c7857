"""What runs when nothing else does: the engine's books are checked once after each time of work, and a failure is told, no more."""

from __future__ import annotations

import asyncio

from structlog.testing import capture_logs
from tokenmill_executor.engine import Engine
from tokenmill_executor.engine_thread import EngineThread
from tokenmill_executor.records import Plan

from tests.fakes.runner import OracleRunner
from tests.unit.engine.plans import admission, hasher


class Counted(Engine):
    """An engine that says when it was checked."""

    def __init__(self) -> None:
        super().__init__(OracleRunner(), 8, 4, 8, hasher=hasher(4))
        self.checks = 0
        self.checked = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def check(self) -> None:
        self.checks += 1
        self._loop.call_soon_threadsafe(self.checked.set)
        super().check()


async def carry_out(thread: EngineThread, plan: Plan) -> None:
    assert await thread.carry_out(plan, lambda: True, lambda _: None) is not None


async def test_c14_the_books_are_checked_once_when_the_engine_idles() -> None:
    engine = Counted()
    thread = EngineThread(check_after_s=0.01)
    await thread.load(lambda: engine)
    await carry_out(thread, Plan(1, 1, (), [admission(1, [1] * 9)], [1], [9]))
    await engine.checked.wait()
    # Behind the check on the engine's thread, then what the loop makes of it.
    await thread.run(lambda: None)
    assert (engine.checks, thread.metrics.integrity_failures) == (1, 0)
    assert await thread.close(30)


async def test_books_that_do_not_balance_are_told_and_work_goes_on() -> None:
    engine = Counted()
    thread = EngineThread(check_after_s=0.01)
    await thread.load(lambda: engine)
    with capture_logs() as logs:
        await carry_out(thread, Plan(1, 1, (), [admission(1, [1] * 9)], [1], [9]))
        engine._blocks.pool._free.pop()
        await engine.checked.wait()
        await thread.run(lambda: None)
        await asyncio.sleep(0)
        assert [entry["event"] for entry in logs] == ["integrity check failed"]
    assert thread.metrics.integrity_failures == 1
    (failures,) = [family for family in thread.gather() if family.name == "tokenmill_executor_integrity_failures"]
    assert failures.samples[0].value == 1
    await carry_out(thread, Plan(1, 2, (), (), [1], [1]))
    assert await thread.close(30)


async def test_a_check_waits_while_there_is_work() -> None:
    engine = Counted()
    thread = EngineThread(check_after_s=3600.0)
    await thread.load(lambda: engine)
    await carry_out(thread, Plan(1, 1, (), [admission(1, [1] * 9)], [1], [9]))
    timer = thread._check
    assert timer is not None
    # As if the time was up: another plan has come since, so the check is put off.
    await carry_out(thread, Plan(1, 2, (), (), [1], [1]))
    thread._check_if_idle(1)
    timer.cancel()
    await thread.run(lambda: None)
    assert (engine.checks, thread._check is not None) == (0, True)
    assert await thread.close(30)
