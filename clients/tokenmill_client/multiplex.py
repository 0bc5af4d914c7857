"""Many streams over one call: a client that keeps many requests open gets what is new of all of them in one message.

To a stream, its part of such a call looks as a call of its own does: it is read and cancelled, and fails with gRPC's errors. A
server that is older and has no such calls is given one for each stream. Must not know: what events mean, how a stream survives.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from copy import copy
from typing import Any, Protocol
from weakref import WeakValueDictionary, ref

import grpc
from google.rpc.status_pb2 import Status
from tokenmill.inference.v1 import inference_pb2 as pb
from tokenmill.inference.v1.inference_pb2_grpc import InferenceServiceStub

from tokenmill_client.transport import Transport

# Far below what a server takes on one stream; one more is opened beyond it.
MAX_LINES = 1_024
# No number is given twice: the next call goes on where one has used them up.
_LAST_NUMBER = (1 << 32) - 1
# A larger request has a call of its own: it would keep the others waiting, and one that a server finds too large ends its call.
_MAX_SHARED_BYTES = 1 << 20
# A line that nobody reads is paused when so much waits, and goes on when half of it is read.
_PAUSE_EVENTS = 64
_PAUSE_BYTES = 1 << 20
# A server without such calls is asked again after this time.
OLD_FOR_S = 60.0

Request = pb.GenerateRequest | pb.AttachRequest
END: object = grpc.aio.EOF  # type: ignore[attr-defined]  # not in the stubs


class StreamCall(Protocol):
    """What is used of a running gRPC call. `read` gives a response, or gRPC's end mark."""

    def read(self) -> Coroutine[Any, Any, object]: ...

    def cancel(self) -> bool: ...


class Multiplexer:
    """Opens streams at the address that the transport is at."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._exchanges: dict[str, list[_Exchange]] = {}
        # Addresses of servers that have no such calls, and until when that is believed: one may be upgraded.
        self._without: dict[str, float] = {}

    def __del__(self) -> None:
        # As gRPC closes a channel that nobody holds any more. Streams hold their client, so none is open.
        for exchanges in self._exchanges.values():
            for one in exchanges:
                one.drop()

    def open(self, request: Request, timeout_s: float | None) -> StreamCall:
        address = self._transport.current
        if self._without.get(address, 0.0) > time.monotonic() or request.ByteSize() > _MAX_SHARED_BYTES:
            return self._alone(request, timeout_s)
        return _Line(self._exchange(address), request, timeout_s, lambda left_s: self._fall_back(address, request, left_s))

    async def close(self) -> None:
        """Every stream ends as one does that is cancelled."""
        await asyncio.gather(*[one.close() for exchanges in self._exchanges.values() for one in exchanges])

    def _exchange(self, address: str) -> _Exchange:
        """The first with room, of those that are open or new."""
        exchanges = self._exchanges[address] = [one for one in self._exchanges.get(address, ()) if not one.is_over]
        for exchange in exchanges:
            if exchange.has_room:
                return exchange
        exchanges.append(_Exchange(self._transport))
        return exchanges[-1]

    def _fall_back(self, address: str, request: Request, timeout_s: float | None) -> StreamCall:
        self._without[address] = time.monotonic() + OLD_FOR_S
        return self._alone(request, timeout_s)

    def _alone(self, request: Request, timeout_s: float | None) -> StreamCall:
        stub = InferenceServiceStub(self._transport.channel)
        if isinstance(request, pb.GenerateRequest):
            return stub.Generate(request, timeout=timeout_s, metadata=self._transport.metadata)
        return stub.Attach(request, timeout=timeout_s, metadata=self._transport.metadata)


class _Exchange:
    """One Multiplex call and its lines, which live as long as somebody holds them."""

    def __init__(self, transport: Transport) -> None:
        self.is_over = False
        self._loop = asyncio.get_running_loop()
        self._lines: WeakValueDictionary[int, _Line] = WeakValueDictionary()
        self._last_number = 0
        self._outgoing: deque[pb.MultiplexRequest] = deque()
        stub = InferenceServiceStub(transport.channel)
        self._call = stub.Multiplex(None, metadata=transport.metadata)
        self._reading = asyncio.create_task(self._read())
        self._sending: asyncio.Task[None] | None = None

    @property
    def has_room(self) -> bool:
        return len(self._lines) < MAX_LINES and self._last_number < _LAST_NUMBER

    def open(self, line: _Line, request: Request) -> int:
        """Returns the number of the line."""
        self._last_number = number = self._last_number + 1
        self._lines[number] = line
        if isinstance(request, pb.GenerateRequest):
            self.send(pb.MultiplexRequest(call=number, generate=request))
        else:
            self.send(pb.MultiplexRequest(call=number, attach=request))
        return number

    def send(self, request: pb.MultiplexRequest) -> None:
        self._outgoing.append(request)
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send())

    def drop(self) -> None:
        """Closes it soon."""
        if not self.is_over:
            self._soon(self._call.cancel)

    def drop_line(self, number: int, timer: asyncio.TimerHandle | None) -> None:
        """Leaves it soon, and its timer with it."""
        self._soon(self.leave, number)
        if timer is not None:
            self._soon(timer.cancel)

    async def close(self) -> None:
        self._call.cancel()
        await asyncio.gather(self._reading, *[self._sending] if self._sending else (), return_exceptions=True)

    def leave(self, number: int) -> None:
        self._lines.pop(number, None)
        if not self.is_over:
            self.send(pb.MultiplexRequest(call=number, leave=pb.MultiplexRequest.Leave()))

    def _soon(self, act: Callable[..., object], *arguments: object) -> None:
        """From any thread, since the garbage collector runs in any."""
        with suppress(RuntimeError):  # the loop is closed, and all that was open with it
            self._loop.call_soon_threadsafe(act, *arguments)

    async def _send(self) -> None:
        # One after the other: gRPC takes no second message while one is under way. What goes wrong shows where the call is read.
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, asyncio.CancelledError):
            # Without this a write can meet a call that has ended, and gRPC then forgets the status that it ended with.
            await self._call.initial_metadata()
            while self._outgoing and not self._call.done():
                await self._call.write(self._outgoing.popleft())

    async def _read(self) -> None:
        failure: BaseException = _rpc_error(grpc.StatusCode.UNAVAILABLE, "the stream of streams ended")
        try:
            while (response := await self._call.read()) is not END:
                assert isinstance(response, pb.MultiplexResponse)
                for event in response.events:
                    self._arrived(event)
        except (grpc.aio.AioRpcError, asyncio.CancelledError) as error:
            failure = error
        finally:
            self.is_over = True
            for line in self._lines.values():
                # To each its own: what is raised holds on to where it was.
                line.fail(copy(failure))

    def _arrived(self, event: pb.MultiplexResponse.CallEvent) -> None:
        line = self._lines.get(event.call)
        if line is not None:  # else it was left while this was under way
            line.arrived(event)


class _Line:
    """One stream's part of an exchange: a `StreamCall`. As a gRPC call does, it ends when nobody holds it any more."""

    def __init__(
        self, exchange: _Exchange, request: Request, timeout_s: float | None, fall_back: Callable[[float | None], StreamCall]
    ) -> None:
        """`fall_back` opens a call of its own, with the seconds left, where the server has no others."""
        loop = asyncio.get_running_loop()
        self.is_over = False
        self._deadline_s = None if timeout_s is None else loop.time() + timeout_s
        self._fall_back = fall_back
        self._alone: StreamCall | None = None
        self._exchange = exchange
        # With the bytes of each.
        self._events: deque[tuple[pb.MultiplexResponse.CallEvent, int]] = deque()
        self._waiting_bytes = 0
        self._came = asyncio.Event()
        self._failure: BaseException | None = None
        self._is_known = self._is_paused = False
        self._number = exchange.open(self, request)
        # It ends in time though nobody reads it. The timer does not hold it: nobody else may.
        self._timer = None if self._deadline_s is None else loop.call_at(self._deadline_s, _expire, ref(self))

    def __del__(self) -> None:
        if not self.is_over:
            self._exchange.drop_line(self._number, self._timer)

    async def read(self) -> object:
        """Raises grpc.aio.AioRpcError."""
        if self._alone is not None:
            return await self._alone.read()
        if not self._events and self._failure is None:
            self._came.clear()
            await self._came.wait()
        if self._events:
            return self._next()
        assert self._failure is not None
        if not self._is_known and _is_unimplemented(self._failure):
            self._alone = self._fall_back(self._left_s())
            return await self._alone.read()
        raise self._failure

    def cancel(self) -> bool:
        if self._alone is not None:
            return self._alone.cancel()
        return self.leave(asyncio.CancelledError())

    def leave(self, why: BaseException) -> bool:
        """False when it is over already. Whoever waits in a read hears of it."""
        if self.is_over:
            return False
        self._exchange.leave(self._number)
        self.fail(why)
        return True

    def arrived(self, event: pb.MultiplexResponse.CallEvent) -> None:
        self._is_known = True
        if event.WhichOneof("what") == "status":
            self._over()
        # While somebody reads nothing waits, and no time is spent on counting.
        size_bytes = event.ByteSize() if self._events else 0
        self._events.append((event, size_bytes))
        self._waiting_bytes += size_bytes
        if not self._is_paused and not self.is_over and self._waits_for(_PAUSE_EVENTS, _PAUSE_BYTES):
            self._is_paused = True
            self._exchange.send(pb.MultiplexRequest(call=self._number, pause=pb.MultiplexRequest.Pause()))
        self._came.set()

    def fail(self, failure: BaseException) -> None:
        self._over()
        self._failure = failure
        self._came.set()

    def _over(self) -> None:
        self.is_over = True
        if self._timer is not None:
            self._timer.cancel()

    def _waits_for(self, num_events: int, size_bytes: int) -> bool:
        return len(self._events) >= num_events or self._waiting_bytes >= size_bytes

    def _next(self) -> object:
        event, size_bytes = self._events[0]
        if event.WhichOneof("what") == "status":
            # It stays: whoever reads on is told again.
            return _end(event.status)
        self._events.popleft()
        self._waiting_bytes -= size_bytes
        if self._is_paused and not self.is_over and not self._waits_for(_PAUSE_EVENTS // 2, _PAUSE_BYTES // 2):
            self._is_paused = False
            self._exchange.send(pb.MultiplexRequest(call=self._number, resume=pb.MultiplexRequest.Resume()))
        return event

    def _left_s(self) -> float | None:
        return None if self._deadline_s is None else max(0.0, self._deadline_s - asyncio.get_running_loop().time())


def _expire(held: ref[_Line]) -> None:
    line = held()
    if line is not None:
        line.leave(_rpc_error(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"))


_CODES: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}


def _end(status: bytes) -> object:
    """gRPC's end mark, or the error that a google.rpc.Status tells of."""
    if not status:
        return END
    told = Status.FromString(status)
    raise _rpc_error(_CODES.get(told.code, grpc.StatusCode.UNKNOWN), told.message, status)


def _rpc_error(code: grpc.StatusCode, message: str, status: bytes = b"") -> grpc.aio.AioRpcError:
    trailers = grpc.aio.Metadata(("grpc-status-details-bin", status)) if status else grpc.aio.Metadata()
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailers, message, None)


def _is_unimplemented(failure: BaseException) -> bool:
    return isinstance(failure, grpc.aio.AioRpcError) and failure.code() is grpc.StatusCode.UNIMPLEMENTED
