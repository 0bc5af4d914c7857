"""One event loop after the other in a process: what gRPC still has to tell the last one disturbs none that follows."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from tokenmill.inference.v1 import inference_pb2 as pb
from tokenmill_client import AsyncClient, call, exchange, transport

from tests.unit.client.fake_server import FakeServer

# Each has its chance to disturb the next.
LOOPS = 4


class Silent(FakeServer):
    """Takes streams on one call and tells nothing of them until it is asked to end it."""

    def __init__(self) -> None:
        super().__init__()
        self.heard = threading.Event()
        self.left: list[object] = []

    def Multiplex(self, requests: Iterator[pb.MultiplexRequest], context: Any) -> Iterator[pb.MultiplexResponse]:  # noqa: N802
        context.send_initial_metadata(())
        for _ in requests:
            self.heard.set()
        yield from ()


@pytest.fixture
def silent() -> Iterator[Silent]:
    server = Silent()
    server.start()
    yield server
    server.stop()


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Where gRPC was waited for. Longer than by default: a machine that is at work must not fail the tests."""
    monkeypatch.setattr(call, "SETTLE_S", 0.2)
    places: list[str] = []

    for module in (exchange, transport):

        async def settle(place: str = module.__name__.rpartition(".")[2]) -> None:
            places.append(place)
            await call.settle()

        monkeypatch.setattr(module, "settle", settle)
    return places


async def open_stream(client: AsyncClient, server: Silent) -> asyncio.Task[Any]:
    reading = asyncio.ensure_future(anext(client.generate("hello")))
    await asyncio.to_thread(server.heard.wait)
    server.heard.clear()
    return reading


async def leave_open(server: Silent) -> None:
    """As a program ends that forgets to close its client."""
    client = AsyncClient(server.address)
    reading = await open_stream(client, server)
    server.left.append((client, reading))


async def close(server: Silent) -> None:
    async with AsyncClient(server.address) as client:
        reading = await open_stream(client, server)
    await asyncio.wait([reading])


async def break_off(server: FakeServer) -> None:
    """With a call of its own for the stream."""
    async with AsyncClient(server.address) as client:
        async for _ in client.generate("hello", max_tokens=4):
            break


async def cancel_call(server: FakeServer) -> None:
    async with AsyncClient(server.address) as client:
        listing = asyncio.ensure_future(client.list_models())
        await asyncio.sleep(0)
        listing.cancel()
        await asyncio.wait([listing])


def disturbances(work: Any, server: FakeServer) -> list[str]:
    """What loops complain of that do such work, one after the other."""
    told: list[str] = []

    async def watched() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(f"{context}"))
        await work(server)

    for _ in range(LOOPS):
        asyncio.run(watched())
    return told


@pytest.mark.parametrize(("work", "waits"), [(leave_open, ["exchange"] * LOOPS), (close, [])])
def test_loops_that_leave_a_shared_call(silent: Silent, settled: list[str], work: Any, waits: list[str]) -> None:
    """One that the server ends in order needs no waiting."""
    assert disturbances(work, silent) == []
    assert settled == waits


@pytest.mark.parametrize("work", [break_off, cancel_call])
def test_loops_that_leave_a_call_of_its_own(server: FakeServer, settled: list[str], work: Any) -> None:
    assert disturbances(work, server) == []
    assert settled == ["transport"] * LOOPS
