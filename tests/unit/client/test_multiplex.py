"""Streams that share one call: what the client sends for them, and what becomes of them when it is lost or not to be had.

The server's part is the real servicer, over a fake desk.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from tokenmill.inference.v1 import inference_pb2 as pb
from tokenmill.inference.v1.inference_pb2_grpc import add_InferenceServiceServicer_to_server
from tokenmill_client import AsyncClient, RetryPolicy, line, multiplex
from tokenmill_client.call import END, StreamCall
from tokenmill_client.errors import (
    DeadlineExceeded,
    InvalidRequest,
    ResourceExhausted,
    ServerError,
    StreamLost,
    Unavailable,
    from_rpc_error,
)
from tokenmill_client.exchange import MAX_LINES
from tokenmill_client.multiplex import Multiplexer
from tokenmill_client.transport import Transport
from tokenmill_scheduler.core.request import State
from tokenmill_scheduler.intake import Intake
from tokenmill_scheduler.servicers.errors import ErrorInterceptor
from tokenmill_scheduler.servicers.inference import InferenceServicer

from tests.fakes.desk import FakeDesk
from tests.unit.servicers.conftest import served_model

Action = str
# What a server takes in one message, unless told otherwise.
GRPC_LIMIT_BYTES = 4 << 20


class Listening(InferenceServicer):
    """Remembers what clients ask of it by Multiplex, how many such calls there were, and counts the events that it told."""

    def __init__(self, desk: FakeDesk) -> None:
        super().__init__(desk, Intake(desk))
        self.heard: list[tuple[Action, int]] = []
        self.exchanges = 0
        self.open_exchanges = 0
        self.told = 0
        self._changed = asyncio.Event()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Returns once something holds of what it remembers."""
        while not holds():
            self._changed.clear()
            await self._changed.wait()

    async def Multiplex(self, requests: AsyncIterator[pb.MultiplexRequest], context: Any) -> AsyncIterator[pb.MultiplexResponse]:  # type: ignore[override]  # noqa: N802
        self.exchanges += 1
        self.open_exchanges += 1

        async def heard() -> AsyncIterator[pb.MultiplexRequest]:
            async for request in requests:
                self.heard.append((request.WhichOneof("action") or "", request.call))
                self._changed.set()
                yield request

        try:
            async for response in super().Multiplex(heard(), context):
                self.told += len(response.events)
                yield response
        finally:
            self.open_exchanges -= 1
            self._changed.set()


class Older(Listening):
    """A server of before there was Multiplex."""

    async def Multiplex(self, requests: AsyncIterator[pb.MultiplexRequest], context: Any) -> AsyncIterator[pb.MultiplexResponse]:  # type: ignore[override]  # noqa: N802
        self.exchanges += 1
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        yield pb.MultiplexResponse()


class Forgetful(Listening):
    """Knows of Multiplex only until it has told something: a proxy that changes its mind."""

    async def Multiplex(self, requests: AsyncIterator[pb.MultiplexRequest], context: Any) -> AsyncIterator[pb.MultiplexResponse]:  # type: ignore[override]  # noqa: N802
        async for response in super().Multiplex(requests, context):
            yield response
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")


class Leaving(Listening):
    """Ends a call at its first message, while more are on their way."""

    async def Multiplex(self, requests: AsyncIterator[pb.MultiplexRequest], context: Any) -> AsyncIterator[pb.MultiplexResponse]:  # type: ignore[override]  # noqa: N802
        await context.send_initial_metadata(())
        await anext(requests)
        await context.abort(grpc.StatusCode.UNAVAILABLE, "Leaving.")
        yield pb.MultiplexResponse()


@dataclass(slots=True)
class Site:
    """A server that can be killed and started again at its address."""

    desk: FakeDesk
    address: str
    servicer: Listening
    server: grpc.aio.Server | None = None

    async def start(self) -> None:
        self.server = grpc.aio.server(interceptors=[ErrorInterceptor()])
        add_InferenceServiceServicer_to_server(self.servicer, self.server)
        self.server.add_insecure_port(self.address)
        await self.server.start()

    async def replace(self, servicer: Listening) -> None:
        await self.stop()
        self.servicer = servicer
        await self.start()

    async def stop(self) -> None:
        assert self.server is not None
        await self.server.stop(None)


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    desk = FakeDesk(served_model())
    site = Site(desk, f"unix:{tmp_path}/s", Listening(desk))
    await site.start()
    yield site
    await site.stop()


@pytest.fixture
async def client(site: Site) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(site.address, retry=RetryPolicy(first_delay_s=0.01)) as client:
        yield client


async def opened(client: AsyncClient, site: Site, request_id: str, **options: Any) -> Any:
    """A stream whose request is accepted, and of which nothing has been read."""
    stream = client.generate(token_ids=[5, 6, 7], request_id=request_id, max_tokens=options.pop("max_tokens", 8), **options)
    reading = asyncio.ensure_future(anext(stream))
    await site.desk.until(lambda: request_id in site.desk.entries and site.desk.open_streams > 0)
    site.desk.produce(request_id, 1)
    await reading
    return stream


async def read_to_end(call: StreamCall) -> None:
    while await call.read() is not END:
        pass


async def test_streams_share_a_call_and_each_has_its_own_tokens(client: AsyncClient, site: Site) -> None:
    streams = [await opened(client, site, f"r{number}") for number in range(20)]
    for number in range(20):
        site.desk.produce(f"r{number}", 7)
    for number, stream in enumerate(streams):
        assert list((await stream.result()).token_ids) == site.desk.entries[f"r{number}"].tokens
    assert site.servicer.exchanges == 1
    assert site.servicer.heard == [("generate", number) for number in range(1, 21)]


async def test_an_older_server_gets_a_call_a_stream_and_is_asked_once(client: AsyncClient, site: Site) -> None:
    await site.replace(Older(site.desk))
    for name in ("a", "b"):
        stream = await opened(client, site, name)
        site.desk.produce(name, 7)
        assert len((await stream.result()).token_ids) == 8
    assert site.servicer.exchanges == 1


async def test_an_older_server_is_asked_again_after_a_while(
    client: AsyncClient, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multiplex, "OLD_FOR_S", 0.0)
    await site.replace(Older(site.desk))
    for name in ("a", "b"):
        stream = await opened(client, site, name)
        site.desk.produce(name, 7)
        assert len((await stream.result()).token_ids) == 8
    assert site.servicer.exchanges == 2


async def test_what_has_told_something_is_not_begun_anew(client: AsyncClient, site: Site) -> None:
    await site.replace(Forgetful(site.desk))
    with pytest.raises(ServerError):
        await client.generate(token_ids=[5], request_id="a").result()
    await site.desk.until(lambda: site.desk.open_streams == 0)


async def test_c13_one_that_is_left_early_is_cancelled_alone(client: AsyncClient, site: Site) -> None:
    left, kept = await opened(client, site, "a"), await opened(client, site, "b")
    await left.aclose()
    await site.desk.until(lambda: site.desk.entries["a"].state is State.CANCELLED)
    site.desk.produce("b", 7)
    assert len((await kept.result()).token_ids) == 8


async def test_one_that_nobody_reads_is_paused_and_goes_on_when_it_is_read(client: AsyncClient, site: Site) -> None:
    """Its tokens then gather at the server, which can tell that nobody reads, and the client's memory stays bounded."""
    stream, other = await opened(client, site, "a", max_tokens=400), await opened(client, site, "b", max_tokens=400)
    for _ in range(300):
        for name in "ab":
            site.desk.produce(name, 1)
        await anext(other)
    assert site.servicer.heard[2:] == [("pause", 1)]
    site.desk.produce("a", 99)
    output = await stream.result()
    assert list(output.token_ids) == site.desk.entries["a"].tokens
    assert site.servicer.heard[2:] == [("pause", 1), ("resume", 1)]
    await other.aclose()


async def test_its_timeout_ends_a_stream_and_its_request(client: AsyncClient, site: Site) -> None:
    stream = client.attach("a", timeout=0.2)
    await client.submit(token_ids=[5, 6, 7], request_id="a")
    with pytest.raises(DeadlineExceeded):
        await stream.result()
    await site.desk.until(lambda: site.desk.open_streams == 0)
    assert site.servicer.heard[-1] == ("leave", 1)


async def test_its_timeout_ends_a_stream_that_nobody_reads(client: AsyncClient, site: Site) -> None:
    """It says so when it is read then, behind what had come."""
    await client.submit(token_ids=[5, 6, 7], request_id="a", max_tokens=8)
    site.desk.produce("a", 2)
    stream = client.attach("a", timeout=0.3)
    assert len((await anext(stream)).token_ids) == 2
    site.desk.produce("a", 3)
    await site.desk.until(lambda: site.desk.open_streams == 0)
    assert site.servicer.heard[-1] == ("leave", 1)
    with pytest.raises(DeadlineExceeded):
        await stream.result()
    assert len(stream.output.token_ids) == 5


async def test_its_timeout_holds_at_an_older_server(client: AsyncClient, site: Site) -> None:
    await site.replace(Older(site.desk))
    await client.submit(token_ids=[5, 6, 7], request_id="a")
    with pytest.raises(DeadlineExceeded):
        await client.attach("a", timeout=0.2).result()
    await site.desk.until(lambda: site.desk.open_streams == 0)


async def test_errors_are_those_of_a_call_of_its_own(client: AsyncClient, site: Site) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await client.generate(token_ids=[5], request_id="not an id").result()
    assert caught.value.violations[0][0] == "request.request_id"
    site.desk.shutting_down = True
    with pytest.raises(Unavailable) as unavailable:
        await AsyncClient(site.address, retry=RetryPolicy(call_limit_s=0)).generate(token_ids=[5]).result()
    assert unavailable.value.retry_delay_s == 2


async def test_an_end_is_told_as_often_as_it_is_asked_for(client: AsyncClient, site: Site) -> None:
    await client.submit(token_ids=[5], request_id="a", max_tokens=1)
    site.desk.produce("a", 1)
    transport = Transport(site.address, timeout=10, retry=RetryPolicy())
    streams = Multiplexer(transport)
    ends, fails = [streams.open(pb.AttachRequest(request_id=request_id), None) for request_id in ("a", "none")]
    await read_to_end(ends)
    assert await ends.read() is END
    for _ in range(2):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await fails.read()
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert not ends.cancel()
    await streams.close()
    await transport.close()


async def test_what_was_lost_before_it_is_read_fails_when_it_is(client: AsyncClient, site: Site) -> None:
    transport = Transport(site.address, timeout=10, retry=RetryPolicy())
    streams = Multiplexer(transport)
    await client.submit(token_ids=[5], request_id="a")
    first, second = [streams.open(pb.AttachRequest(request_id="a"), None) for _ in range(2)]
    await site.desk.until(lambda: site.desk.open_streams == 2)
    await site.stop()
    for call in (first, second):
        with pytest.raises(grpc.aio.AioRpcError):
            await read_to_end(call)
    await streams.close()
    await transport.close()
    await site.start()


async def test_c72_all_are_taken_up_again_on_one_new_call_when_it_is_lost(client: AsyncClient, site: Site) -> None:
    streams = [await opened(client, site, f"r{number}", detached=True) for number in range(20)]
    results = asyncio.gather(*[stream.result() for stream in streams])
    await site.stop()
    for number in range(20):
        site.desk.produce(f"r{number}", 3)
    await site.start()
    await site.desk.until(lambda: site.desk.open_streams == 20)
    for number in range(20):
        site.desk.produce(f"r{number}", 4)
    for number, output in enumerate(await results):
        assert list(output.token_ids) == site.desk.entries[f"r{number}"].tokens
    assert site.servicer.exchanges == 2


async def test_c72_a_call_that_ends_while_something_is_written_to_it_is_a_lost_connection(site: Site) -> None:
    """gRPC then often tells an INTERNAL of its own in place of the status."""
    await site.replace(Leaving(site.desk))
    transport = Transport(site.address, timeout=10, retry=RetryPolicy())
    for _ in range(20):
        streams = Multiplexer(transport)
        calls = [streams.open(pb.AttachRequest(request_id="a"), None) for _ in range(50)]
        ends = await asyncio.gather(*[call.read() for call in calls], return_exceptions=True)
        assert {type(from_rpc_error(end)) for end in ends if isinstance(end, grpc.aio.AioRpcError)} == {Unavailable}
        await streams.close()
    await transport.close()


async def test_more_than_a_call_carries_opens_another(client: AsyncClient, site: Site) -> None:
    streams = [client.generate(token_ids=[5], request_id=f"r{number}", max_tokens=1) for number in range(MAX_LINES + 1)]
    results = asyncio.gather(*[stream.result() for stream in streams])
    await site.desk.until(lambda: site.desk.open_streams == MAX_LINES + 1)
    assert site.servicer.exchanges == 2
    for number in range(MAX_LINES + 1):
        site.desk.produce(f"r{number}", 1)
    assert all(len(output.token_ids) == 1 for output in await results)


async def test_no_stream_leaves_its_timer_behind(client: AsyncClient, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it ends, is left, is let go of, or is lost."""
    loop, timers = asyncio.get_running_loop(), list[asyncio.TimerHandle]()
    call_at = loop.call_at

    def kept(when: float, callback: Any, *arguments: Any, **context: Any) -> asyncio.TimerHandle:
        timer = call_at(when, callback, *arguments, **context)
        if callback is line._expire:
            timers.append(timer)
        return timer

    monkeypatch.setattr(loop, "call_at", kept)
    transport = Transport(site.address, timeout=10, retry=RetryPolicy())
    streams = Multiplexer(transport)
    await client.submit(token_ids=[5], request_id="a", max_tokens=1)
    await client.submit(token_ids=[5], request_id="b", max_tokens=1)
    ended = streams.open(pb.AttachRequest(request_id="a"), 3600)
    left, held, lost = [streams.open(pb.AttachRequest(request_id="b"), 3600) for _ in range(3)]
    site.desk.produce("a", 1)
    await read_to_end(ended)
    left.cancel()
    del held
    gc.collect()
    await site.desk.until(lambda: site.desk.open_streams == 1)
    await site.stop()
    with pytest.raises(grpc.aio.AioRpcError):
        await read_to_end(lost)
    assert [timer.cancelled() for timer in timers] == [True] * 4
    await streams.close()
    await transport.close()
    await site.start()


@pytest.mark.parametrize("whole_client", [False, True])
async def test_closing_ends_whoever_waits_in_a_read_and_cancels_the_request(site: Site, whole_client: bool) -> None:
    async with AsyncClient(site.address) as client:
        stream = await opened(client, site, "a")
        reading = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        await (client.close() if whole_client else stream.aclose())
        with pytest.raises(asyncio.CancelledError):
            await reading
        await site.desk.until(lambda: site.desk.entries["a"].state is State.CANCELLED)


async def test_closing_has_the_server_end_the_call(client: AsyncClient, site: Site) -> None:
    """gRPC is not done with one that is cancelled when the client thinks it is."""
    await opened(client, site, "a")
    exchange = client._streams._exchanges[site.address][0]
    await client.close()
    assert await exchange._call.code() is grpc.StatusCode.OK
    await site.servicer.until(lambda: not site.servicer.open_exchanges)
    assert site.desk.entries["a"].state is State.CANCELLED


async def test_c13_a_stream_that_nobody_holds_is_left(client: AsyncClient, site: Site) -> None:
    """As in `async for delta in client.generate(...): break`; gRPC does so with a call of its own."""
    stream = await opened(client, site, "a")
    del stream
    gc.collect()
    await site.desk.until(lambda: site.desk.entries["a"].state is State.CANCELLED)
    assert site.servicer.heard[-1] == ("leave", 1)


async def test_the_garbage_collector_may_run_in_any_thread(client: AsyncClient, site: Site) -> None:
    held = [await opened(client, site, "a")]
    await asyncio.to_thread(held.clear)
    await site.desk.until(lambda: site.desk.entries["a"].state is State.CANCELLED)


async def test_a_client_that_nobody_holds_leaves_no_call_open(site: Site) -> None:
    client = AsyncClient(site.address)
    stream = await opened(client, site, "a")
    site.desk.produce("a", 7)
    await stream.result()
    del stream, client
    gc.collect()
    await site.servicer.until(lambda: not site.servicer.open_exchanges)


async def test_calls_with_room_are_filled_before_another_is_opened(
    client: AsyncClient, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenmill_client.exchange.MAX_LINES", 2)
    for turn in range(4):
        streams = [await opened(client, site, f"r{turn}{number}") for number in range(3)]
        for number, stream in enumerate(streams):
            site.desk.produce(f"r{turn}{number}", 7)
            await stream.result()
    assert site.servicer.exchanges == 2


async def test_a_call_whose_numbers_are_used_up_is_followed_by_another(
    client: AsyncClient, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenmill_client.exchange._LAST_NUMBER", 2)
    streams = [await opened(client, site, f"r{number}") for number in range(3)]
    for number, stream in enumerate(streams):
        site.desk.produce(f"r{number}", 7)
        assert list((await stream.result()).token_ids) == site.desk.entries[f"r{number}"].tokens
    assert site.servicer.heard == [("generate", 1), ("generate", 2), ("generate", 1)]


async def test_c57_what_is_too_large_for_the_server_fails_alone(client: AsyncClient, site: Site) -> None:
    stream = await opened(client, site, "a")
    with pytest.raises(ResourceExhausted):
        await client.generate("x" * GRPC_LIMIT_BYTES).result()
    site.desk.produce("a", 7)
    assert len((await stream.result()).token_ids) == 8


async def test_one_that_nobody_reads_is_paused_by_the_size_of_what_waits(client: AsyncClient, site: Site) -> None:
    """A long output with log probabilities, attached to late, comes in few large events."""
    site.desk.served["tiny"] = served_model(max_model_len=20_100, pool_tokens=20_100)
    await client.submit(token_ids=[5, 6, 7], request_id="a", max_tokens=20_000, logprobs=20)
    site.desk.produce("a", 20_000)
    stream = client.attach("a")
    await anext(stream)
    await site.servicer.until(lambda: ("pause", 1) in site.servicer.heard)
    assert site.servicer.told <= 8, "accepted and some of ten deltas"
    output = await stream.result()
    assert [entry.logprob for entry in output.logprobs] == [-0.5 * index for index in range(20_000)]
    assert site.servicer.heard[:3] == [("attach", 1), ("pause", 1), ("resume", 1)]


async def test_each_stream_has_an_error_of_its_own(client: AsyncClient, site: Site) -> None:
    """One that is raised in many tasks would hold on to all their frames."""
    lost = AsyncClient(site.address, retry=RetryPolicy(call_limit_s=0, attach_limit_s=0))
    streams = [await opened(lost, site, f"r{number}", detached=True) for number in range(3)]
    await site.stop()
    errors = await asyncio.gather(*[stream.result() for stream in streams], return_exceptions=True)
    assert all(isinstance(error, StreamLost) for error in errors)
    assert len({id(error.__cause__.__cause__) for error in errors if isinstance(error, StreamLost) and error.__cause__}) == 3
    await site.start()
    await lost.close()


async def test_c72_of_two_addresses_an_older_server_and_a_newer_take_over_from_each_other(site: Site, tmp_path: Path) -> None:
    older = Site(site.desk, f"unix:{tmp_path}/older", Older(site.desk))
    await older.start()
    async with AsyncClient(f"{older.address},{site.address}", retry=RetryPolicy(first_delay_s=0.01)) as client:
        stream = await opened(client, site, "a", detached=True)
        result = asyncio.ensure_future(stream.result())
        await older.stop()
        await site.servicer.until(lambda: site.servicer.heard == [("attach", 1)])
        await older.start()
        await site.stop()
        await site.desk.until(lambda: site.desk.open_streams == 1)
        site.desk.produce("a", 7)
        assert list((await result).token_ids) == site.desk.entries["a"].tokens
    assert older.servicer.exchanges == 1
    await older.stop()
    await site.start()
