"""A session over a stream whose writes take as long as the test wants."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import cast

import grpc
import pytest
from tokenmill.executor.v1 import executor_pb2 as pb
from tokenmill_executor.engine import Engine
from tokenmill_executor.engine_thread import EngineThread
from tokenmill_executor.records import Blocks, Standing
from tokenmill_executor.session import Context, Session
from tokenmill_executor.wire import PlanLimits

from tests.fakes.runner import OracleRunner
from tests.unit.engine.scheduler import admission

OK = grpc.StatusCode.OK


class Stream:
    """Both directions of a stream: `requests` to put, `written` to look at. A write ends when the gate is open."""

    def __init__(self) -> None:
        self.requests: asyncio.Queue[pb.RunRequest] = asyncio.Queue()
        self.written: list[str | None] = []
        self.interrupted = False
        self.gate = asyncio.Event()
        self.writing = asyncio.Event()

    async def read(self) -> AsyncIterator[pb.RunRequest]:
        while True:
            yield await self.requests.get()
            # Asked for the next one, so done with this one.
            self.requests.task_done()

    async def write(self, response: pb.RunResponse) -> None:
        self.writing.set()
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.interrupted = True
            raise
        self.written.append(response.WhichOneof("message"))

    async def next_write(self) -> None:
        await self.writing.wait()
        self.writing.clear()


@pytest.fixture
async def thread() -> AsyncIterator[EngineThread]:
    thread = EngineThread()
    await thread.load(lambda: Engine(OracleRunner(), 16, 4, 8))
    yield thread
    assert await thread.close(30)


def begin(thread: EngineThread, stream: Stream) -> tuple[Session, asyncio.Task[object]]:
    session = Session(1, thread, PlanLimits(8, 64), pipeline_depth=2, heartbeat_interval_s=60.0)
    serving = session.serve(stream.read(), cast(Context, stream), Standing(Blocks(16, 0, 0)))
    return session, asyncio.create_task(serving)


async def test_an_end_waits_for_the_write_in_progress_and_writes_no_more(thread: EngineThread) -> None:
    """Else the status cannot be sent: gRPC refuses it while a write, cancelled or not, is under way."""
    stream = Stream()
    session, serving = begin(thread, stream)
    await stream.next_write()
    await stream.requests.put(pb.RunRequest(plan=pb.Plan(epoch=1, plan_id=1)))
    await stream.requests.join()
    # Behind the plan on the engine's thread: its answer waits to be written then.
    await thread.run(lambda: None)
    session.end(OK, "over")
    await serving
    written = asyncio.create_task(session.written())
    await asyncio.wait([written], timeout=0)
    assert not written.done()
    stream.gate.set()
    await written
    assert (stream.written, stream.interrupted) == (["welcome"], False)


async def test_leaving_waits_until_the_last_answer_is_written(thread: EngineThread) -> None:
    stream = Stream()
    session, serving = begin(thread, stream)
    stream.gate.set()
    await stream.next_write()
    stream.gate.clear()
    plan = pb.Plan(epoch=1, plan_id=1, admit=[admission(1, [5])], advance_sequence_ids=[1], advance_max_tokens=[1])
    await stream.requests.put(pb.RunRequest(plan=plan))
    await stream.next_write()
    session.leave(OK, "goodbye")
    await asyncio.wait([serving], timeout=0)
    assert not session.ended
    stream.gate.set()
    await serving
    await session.written()
    assert stream.written == ["welcome", "result"]
