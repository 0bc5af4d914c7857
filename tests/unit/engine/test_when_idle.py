"""What is done when there is nothing else to do: memory is populated, and the books are checked once after each time of work."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import pytest
from structlog.testing import capture_logs
from tokenmill_executor.engine import Engine
from tokenmill_executor.engine_thread import EngineThread
from tokenmill_executor.records import Plan
from tokenmill_executor.when_idle import WhenIdle

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


class Unpopulated(OracleRunner):
    """Whose memory has three pieces; the second one is not done before `allowed`."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces = 0
        self.begun, self.allowed, self.done = threading.Event(), threading.Event(), threading.Event()

    def populate_some(self) -> bool:
        if self.pieces == 3:
            self.done.set()
            return False
        self.pieces += 1
        if self.pieces == 2:
            self.begun.set()
            assert self.allowed.wait(30)
        return True


@pytest.mark.parametrize("after_all_steps", [False, True])
async def test_memory_is_populated_while_there_is_no_plan_and_a_plan_waits_for_one_piece(after_all_steps: bool) -> None:
    runner = Unpopulated()
    thread = EngineThread()
    await thread.load(lambda: Engine(runner, 8, 4, 8))
    assert await asyncio.to_thread(runner.begun.wait, 30)
    pieces_before: list[int] = []
    plan = replace(Plan(1, 1, (), [admission(1, [1] * 9)], [1], [9]), after_all_steps=after_all_steps)
    answer = thread.carry_out(plan, lambda: True, lambda _: pieces_before.append(runner.pieces))
    runner.allowed.set()
    assert await answer is not None
    assert pieces_before == [2]
    assert await asyncio.to_thread(runner.done.wait, 30)
    assert await thread.close(30)


async def test_what_is_done_when_idle_waits_for_activity_to_end_and_is_done_once() -> None:
    activity: int | None = 0
    times: list[int | None] = []
    acted = asyncio.Event()

    def act() -> None:
        times.append(activity)
        acted.set()

    idle = WhenIdle(0.01, lambda: activity, act)
    idle.start()
    activity = None
    for _ in range(3):
        await asyncio.sleep(0.01)
        idle.start()
    assert not times
    activity = 1
    await asyncio.wait_for(acted.wait(), 30)
    idle.start()
    idle.close()
    idle.start()
    await asyncio.sleep(0.03)
    assert times == [1]
