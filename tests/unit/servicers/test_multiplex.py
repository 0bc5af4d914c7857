"""Multiplex: many calls over one stream, each as a call of its own would be, none in another's way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from google.rpc import code_pb2
from google.rpc.status_pb2 import Status
from tokenmill.inference.v1 import inference_pb2 as pb
from tokenmill.inference.v1.inference_pb2_grpc import InferenceServiceStub, add_InferenceServiceServicer_to_server
from tokenmill.inference.v1.types_pb2 import SamplingParams
from tokenmill_scheduler.access import Access, Identity
from tokenmill_scheduler.core.request import State
from tokenmill_scheduler.desk.errors import Unavailable
from tokenmill_scheduler.intake import Intake, InvalidArgument
from tokenmill_scheduler.servicers.auth import AuthInterceptor
from tokenmill_scheduler.servicers.errors import ErrorInterceptor
from tokenmill_scheduler.servicers.inference import InferenceServicer
from tokenmill_scheduler.servicers.multiplex import Multiplexed, Outbox
from tokenmill_scheduler.servicers.statuses import told_of
from tokenmill_scheduler.tenants import TenantLimits

from tests.fakes.desk import FakeDesk
from tests.unit.servicers.calls import refusal, spec, violations
from tests.unit.servicers.conftest import Served

CallEvent = pb.MultiplexResponse.CallEvent
Request = pb.MultiplexRequest
IDS = pb.OutputOptions(token_ids=True)


def generate(call: int, **fields: Any) -> Request:
    return Request(call=call, generate=pb.GenerateRequest(request=spec(**fields), output=IDS))


def leave(call: int) -> Request:
    return Request(call=call, leave=Request.Leave())


class Exchange:
    """A raw Multiplex call, and what has come of each of its calls."""

    def __init__(self, stub: Any, metadata: Any = ()) -> None:
        self.call = stub.Multiplex(metadata=metadata)
        self.came: dict[int, list[CallEvent]] = {}
        self.messages: list[pb.MultiplexResponse] = []

    async def send(self, *requests: Request) -> None:
        for request in requests:
            await self.call.write(request)

    async def read(self) -> pb.MultiplexResponse | None:
        message = await self.call.read()
        if message is grpc.aio.EOF:  # type: ignore[attr-defined]  # not in the stubs
            return None
        self.messages.append(message)
        for event in message.events:
            self.came.setdefault(event.call, []).append(event)
        return message  # type: ignore[no-any-return]

    async def until_over(self, *calls: int) -> None:
        while not all(self.status(call) is not None for call in calls):
            await self.read()

    async def until_accepted(self, *calls: int) -> None:
        while not all(self.came.get(call) for call in calls):
            await self.read()

    def status(self, call: int) -> Status | None:
        """How it ended, once it has."""
        last = (self.came.get(call) or [CallEvent()])[-1]
        return Status.FromString(last.status) if last.WhichOneof("what") == "status" else None

    def tokens(self, call: int) -> list[int]:
        return [token_id for event in self.came[call] for token_id in event.event.delta.token_ids]


async def test_what_a_commit_brings_to_all_comes_in_one_message(served: Served) -> None:
    exchange = Exchange(served.inference)
    await exchange.send(*[generate(number, request_id=f"r{number}") for number in range(50)])
    await exchange.until_accepted(*range(50))
    before = len(exchange.messages)
    for number in range(50):
        served.desk.produce(f"r{number}", 3)
    while sum(len(exchange.tokens(number)) for number in range(50)) < 150:
        await exchange.read()
    assert len(exchange.messages) - before <= 2
    for number in range(50):
        served.desk.produce(f"r{number}", 5)
    await exchange.until_over(*range(50))
    for number in range(50):
        assert exchange.tokens(number) == served.desk.entries[f"r{number}"].tokens
        assert exchange.came[number][-2].event.finished.usage.output_tokens == 8
        assert exchange.status(number) == Status()


async def test_a_call_that_fails_leaves_the_others_alone(served: Served) -> None:
    exchange = Exchange(served.inference)
    await exchange.send(
        generate(1, request_id="a"), generate(2, request_id="not an id"), Request(call=3, attach=pb.AttachRequest())
    )
    await exchange.until_over(2, 3)
    await exchange.until_accepted(1)
    for call in (2, 3):
        status = exchange.status(call)
        assert status is not None
        assert status.code == code_pb2.INVALID_ARGUMENT
        assert len(status.details) == 2, "the reason and the field at fault"
    served.desk.produce("a", 8)
    await exchange.until_over(1)
    assert len(exchange.tokens(1)) == 8


async def test_c13_one_that_is_left_is_cancelled_alone_and_all_are_with_the_stream(served: Served) -> None:
    exchange = Exchange(served.inference)
    detached = Request(call=4, generate=pb.GenerateRequest(request=spec(request_id="d", detached=True)))
    await exchange.send(generate(1, request_id="a"), generate(2, request_id="b"), generate(3, request_id="c"), detached)
    await exchange.until_accepted(1, 2, 3, 4)
    await exchange.send(leave(2), leave(99))
    await served.desk.until(lambda: served.desk.entries["b"].state is State.CANCELLED)
    served.desk.produce("a", 1)
    while not exchange.tokens(1):
        await exchange.read()
    exchange.call.cancel()
    await served.desk.until(lambda: served.desk.open_streams == 0)
    assert [served.desk.entries[name].state for name in "acd"] == [State.CANCELLED, State.CANCELLED, State.WAITING]


async def test_a_paused_call_holds_its_tokens_back_and_then_brings_them_together(served: Served) -> None:
    exchange = Exchange(served.inference)
    sampling = SamplingParams(max_tokens=100)
    await exchange.send(generate(1, request_id="a", sampling=sampling), generate(2, request_id="b", sampling=sampling))
    await exchange.until_accepted(1, 2)
    await exchange.send(Request(call=1, pause=Request.Pause()))

    async def produce_one() -> None:
        for name in "ab":
            served.desk.produce(name, 1)
        while len(exchange.tokens(2)) < len(served.desk.entries["b"].tokens):
            await exchange.read()

    await produce_one()
    while len(exchange.tokens(1)) == len(served.desk.entries["a"].tokens):
        await produce_one()  # the call for a pause is under way
    came = exchange.tokens(1)
    for _ in range(40):
        await produce_one()
    assert exchange.tokens(1) == came
    held = len(served.desk.entries["a"].tokens) - len(came)
    await exchange.send(Request(call=1, resume=Request.Resume()))
    await exchange.read()
    assert exchange.came[1][-1].event.delta.token_count == held
    assert exchange.tokens(1) == served.desk.entries["a"].tokens


async def test_its_end_of_requests_lets_the_calls_end_first(served: Served) -> None:
    exchange = Exchange(served.inference)
    await exchange.send(generate(1, request_id="a"))
    await exchange.until_accepted(1)
    await exchange.call.done_writing()
    for count in range(1, 9):
        served.desk.produce("a", 1)
        while len(exchange.tokens(1)) < count:
            await exchange.read()
    while await exchange.read() is not None:
        pass
    assert exchange.status(1) == Status()
    assert await exchange.call.code() is grpc.StatusCode.OK


@pytest.mark.parametrize(
    ("second", "field"), [(generate(1), "call"), (Request(call=2), "action"), (Request(), "action")], ids=["twice", "none", "empty"]
)
async def test_what_breaks_the_protocol_ends_the_stream_and_its_calls(served: Served, second: Request, field: str) -> None:
    exchange = Exchange(served.inference)
    await exchange.send(generate(1, request_id="a"))
    await exchange.until_accepted(1)
    await exchange.send(second)
    assert list(violations(await refusal(exchange.call.read()))) == [field]
    await served.desk.until(lambda: served.desk.entries["a"].state is State.CANCELLED)


async def test_what_cannot_be_decoded_ends_the_stream(served: Served) -> None:
    call = served.channel.stream_stream("/tokenmill.inference.v1.InferenceService/Multiplex", None, None)(None)
    await call.write(b"\xff\xff")
    assert list(violations(await refusal(call.read()))) == ["message"]


async def test_more_calls_than_a_stream_carries_are_refused_alone(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    most = 20
    monkeypatch.setattr("tokenmill_scheduler.servicers.multiplex.MAX_CALLS", most)
    exchange = Exchange(served.inference)
    await exchange.send(*[generate(number, request_id=f"r{number}") for number in range(most + 1)])
    await exchange.until_over(most)
    status = exchange.status(most)
    assert status is not None
    assert status.code == code_pb2.RESOURCE_EXHAUSTED
    await exchange.until_accepted(*range(most))
    await exchange.send(leave(0))
    await served.desk.until(lambda: served.desk.entries["r0"].state is State.CANCELLED)
    await exchange.send(generate(most + 1, request_id="last"))
    await exchange.until_accepted(most + 1)
    exchange.call.cancel()
    await served.desk.until(lambda: served.desk.open_streams == 0)


async def test_c45_shutdown_ends_the_calls_each_with_its_reason_and_then_the_stream(served: Served) -> None:
    exchange = Exchange(served.inference)
    await exchange.send(generate(1, request_id="a"), generate(2, request_id="b"))
    await exchange.until_accepted(1, 2)
    await exchange.send(Request(call=2, pause=Request.Pause()))
    served.desk.produce("b", 1)
    served.desk.shut_down()
    closing = asyncio.create_task(served.servicer.close_streams(Unavailable("the scheduler is shutting down", 2.0)))
    await exchange.until_over(1, 2)
    for call in (1, 2):
        status = exchange.status(call)
        assert status is not None
        assert status.code == code_pb2.UNAVAILABLE
    assert (await refusal(exchange.call.read())).code() is grpc.StatusCode.UNAVAILABLE
    await closing


async def test_c45_a_pause_that_comes_during_shutdown_keeps_nobody_waiting(served: Served) -> None:
    exchange = Exchange(served.inference)
    await exchange.send(generate(1, request_id="a"))
    await exchange.until_accepted(1)
    closing = asyncio.create_task(served.servicer.close_streams(Unavailable("the scheduler is shutting down", 2.0)))
    # The second is refused, so the first is heard by then.
    await exchange.send(Request(call=1, pause=Request.Pause()), generate(2, request_id="not an id"))
    await exchange.until_over(2)
    served.desk.produce("a", 1)
    while not exchange.tokens(1):
        await exchange.read()
    served.desk.shut_down()
    await exchange.until_over(1)
    await closing


async def test_refusals_of_submits_are_counted_those_of_streams_are_not(desk: FakeDesk, tmp_path: Any) -> None:
    refused: list[str] = []
    async for stub in serve(desk, tmp_path, Access(None, TenantLimits()), refused):
        exchange = Exchange(stub)
        await exchange.send(generate(1, request_id="not an id"), Request(call=2, attach=pb.AttachRequest(request_id="none")))
        await exchange.until_over(1, 2)
        await exchange.send(generate(3, request_id="a"))
        await exchange.until_accepted(3)
        desk.shut_down()
        await exchange.until_over(3)
        assert refused == ["INVALID_ARGUMENT"]
        exchange.call.cancel()


async def test_a_token_that_is_taken_back_opens_no_further_call(desk: FakeDesk, tmp_path: Any) -> None:
    """Streams that are open go on, as those of calls of their own do."""

    class Mutable(Access):
        known = True

        @property
        def needs_token(self) -> bool:
            return True

        def identify(self, token: str) -> Identity | None:
            return Identity("ann", "client", "apple") if self.known else None  # type: ignore[arg-type]

    access = Mutable(None, TenantLimits())
    async for stub in serve(desk, tmp_path, access, []):
        exchange = Exchange(stub, (("authorization", "Bearer secret"),))
        await exchange.send(generate(1, request_id="a"))
        await exchange.until_accepted(1)
        assert desk.entries["a"].request.tenant == "apple"
        access.known = False
        await exchange.send(generate(2, request_id="b"), Request(call=3, attach=pb.AttachRequest(request_id="a")))
        await exchange.until_over(2, 3)
        statuses = [exchange.status(call) for call in (2, 3)]
        assert [status and status.code for status in statuses] == [code_pb2.UNAUTHENTICATED] * 2
        desk.produce("a", 8)
        await exchange.until_over(1)
        assert len(exchange.tokens(1)) == 8
        assert (await refusal(Exchange(stub).call.read())).code() is grpc.StatusCode.UNAUTHENTICATED


async def serve(desk: FakeDesk, folder: Any, access: Access, refused: list[str]) -> AsyncIterator[Any]:
    server = grpc.aio.server(interceptors=[ErrorInterceptor(), AuthInterceptor(access)])
    add_InferenceServiceServicer_to_server(InferenceServicer(desk, Intake(desk), refused.append), server)
    server.add_insecure_port(f"unix:{folder}/m")
    await server.start()
    async with grpc.aio.insecure_channel(f"unix:{folder}/m") as channel:
        yield InferenceServiceStub(channel)
    await server.stop(None)


# ---- the outbox ----------------------------------------------------------------------------------------------------------------


async def turns(count: int) -> None:
    """Lets all that can run do so."""
    for _ in range(count):
        await asyncio.sleep(0)


def fill(event: CallEvent, size: int = 1) -> CallEvent:
    event.event.delta.text = "x" * size
    return event


async def test_a_call_brings_one_event_a_message_while_the_client_is_slow() -> None:
    outbox = Outbox()
    brought = 0

    async def bring() -> None:
        nonlocal brought
        while True:
            await outbox.added(fill(outbox.add(1)))
            brought += 1
            await asyncio.sleep(0)

    await outbox.added(fill(outbox.add(2)))
    messages = outbox.messages()
    assert len((await anext(messages)).events) == 1
    task = asyncio.create_task(bring())
    await turns(100)
    assert brought == 0, "the first message is still under way"
    for _ in range(5):
        assert [event.call for event in (await anext(messages)).events] == [1]
        await turns(100)
    assert brought <= 5
    task.cancel()


async def test_messages_are_complete_at_a_size() -> None:
    outbox = Outbox()

    async def bring(call: int) -> None:
        await outbox.added(fill(outbox.add(call), 100_000))

    adding = [asyncio.create_task(bring(number)) for number in range(10)]
    await asyncio.sleep(0)
    outbox.close()
    sizes = [[event.call for event in message.events] async for message in outbox.messages()]
    assert sizes == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
    await asyncio.gather(*adding)


async def test_what_a_call_was_filling_in_when_it_failed_is_dropped() -> None:
    outbox = Outbox()
    await outbox.added(fill(outbox.add(1)))
    fill(outbox.add(2))
    outbox.end(2, Status(code=code_pb2.INTERNAL))
    outbox.close()
    (message,) = [message async for message in outbox.messages()]
    assert [(event.call, event.WhichOneof("what")) for event in message.events] == [(1, "event"), (2, "status")]


async def test_a_small_call_has_its_turn_among_large_ones() -> None:
    outbox = Outbox()

    async def bring(call: int, size: int) -> None:
        while True:
            await outbox.added(fill(outbox.add(call), size))

    tasks = [asyncio.create_task(bring(call, size)) for call, size in [(1, 300_000), (2, 300_000), (3, 300_000), (4, 10)]]
    messages = outbox.messages()
    calls: list[int] = []
    for _ in range(24):
        calls += [event.call for event in (await anext(messages)).events]
        await turns(10)
    assert min(calls.count(call) for call in (1, 2, 3, 4)) >= 5
    for task in tasks:
        task.cancel()


# ---- without gRPC --------------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def refuse(request: Request, new: Callable[[], CallEvent]) -> AsyncIterator[AsyncGenerator[CallEvent, None]]:
    raise InvalidArgument.of("request", "x" * 200)
    yield


async def test_who_sends_much_and_reads_nothing_fills_no_memory() -> None:
    heard = 0

    async def requests() -> AsyncGenerator[Request, None]:
        nonlocal heard
        while True:
            heard += 1
            yield Request(call=heard, generate=pb.GenerateRequest())
            await asyncio.sleep(0)

    responses = Multiplexed(refuse, lambda error, request, told: told_of(error, "Generate")).run(requests())
    await anext(responses)
    await turns(5_000)
    assert heard < 2_500
    await responses.aclose()
