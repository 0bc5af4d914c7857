"""A running executor service on a unix socket, in this process, with any runner."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import pytest
import structlog.testing
from tokenmill.executor.v1.executor_pb2_grpc import ExecutorServiceStub
from tokenmill_executor.loading import Loader
from tokenmill_executor.records import Blocks, Plan
from tokenmill_executor.runner import Runner
from tokenmill_executor.server import ExecutorServer
from tokenmill_executor.settings import parse_settings

from tests.unit.engine.scheduler import FakeScheduler

if TYPE_CHECKING:
    # Exists in the typed stubs only.
    from tokenmill.executor.v1.executor_pb2_grpc import ExecutorServiceAsyncStub

Start = Callable[..., Awaitable["Service"]]


class Service:
    """`server`, a stub to it, and schedulers that drive it."""

    def __init__(self, server: ExecutorServer, channel: grpc.aio.Channel) -> None:
        self.server = server
        self.channel = channel
        self.stopped = False
        self.stub: ExecutorServiceAsyncStub = ExecutorServiceStub(channel)

    async def stop(self) -> None:
        self.stopped = True
        assert await self.server.stop(timeout_s=30)

    async def blocks(self) -> Blocks:
        """As they stand behind all jobs the engine's thread has now."""
        answer = await self.server.thread.carry_out(Plan(epoch=0, plan_id=0), lambda: True, lambda _: None)
        assert answer is not None
        return answer.result.blocks

    async def scheduler(self, epoch: int) -> FakeScheduler:
        """One that has been welcomed."""
        scheduler = FakeScheduler(self.stub, epoch)
        await scheduler.hello()
        return scheduler


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Failures on purpose need no log."""
    with structlog.testing.capture_logs():
        yield


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    running: list[Service] = []

    async def start(runner: Runner, *flags: str, heartbeat_interval_s: float = 60.0, load: bool = True) -> Service:
        settings = parse_settings(["--model=simulated", f"--listen=unix:{tmp_path}/x.sock", *flags], {})
        server = ExecutorServer(settings, Loader(settings, lambda _: runner), heartbeat_interval_s)
        await server.bind()
        if load:
            await server.load()
        options = [("grpc.max_receive_message_length", settings.max_message_bytes)]
        service = Service(server, grpc.aio.insecure_channel(server.address, options=options))
        running.append(service)
        return service

    yield start
    for service in running:
        if not service.stopped:
            await service.stop()
        await service.channel.close(None)
