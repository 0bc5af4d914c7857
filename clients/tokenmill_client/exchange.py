"""One Multiplex call: what is new of all streams on it comes in one message. Must not know: what events mean, other servers."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from copy import copy
from weakref import WeakValueDictionary

import grpc
from tokenmill.inference.v1 import inference_pb2 as pb
from tokenmill.inference.v1.inference_pb2_grpc import InferenceServiceStub

from tokenmill_client.call import END, Request, rpc_error, settle
from tokenmill_client.line import Line
from tokenmill_client.transport import Transport

# Far below what a server takes on one stream; one more is opened beyond it.
MAX_LINES = 1_024
# No number is given twice: the next call goes on where one has used them up.
_LAST_NUMBER = (1 << 32) - 1
# A server that does not end the call when it is asked to is not waited for.
_CLOSE_LIMIT_S = 1.0


class Exchange:
    """The call and its lines, which live as long as somebody holds them."""

    def __init__(self, transport: Transport) -> None:
        self.is_over = False
        self._loop = asyncio.get_running_loop()
        self._lines: WeakValueDictionary[int, Line] = WeakValueDictionary()
        self._last_number = 0
        self._outgoing: deque[pb.MultiplexRequest] = deque()
        self._is_closing = False
        stub = InferenceServiceStub(transport.channel)
        self._call = stub.Multiplex(None, metadata=transport.metadata)
        self._reading = asyncio.create_task(self._read())
        self._sending: asyncio.Task[None] | None = None

    @property
    def has_room(self) -> bool:
        return len(self._lines) < MAX_LINES and self._last_number < _LAST_NUMBER and not self._is_closing

    def open(self, line: Line, request: Request) -> int:
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
        self._go_on_sending()

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
        """Every line ends as one that is cancelled. The call is not: gRPC is done with one only when the server has ended it."""
        for line in list(self._lines.values()):
            line.cancel()
        self._is_closing = True
        self._go_on_sending()
        await asyncio.wait([self._reading], timeout=_CLOSE_LIMIT_S)
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

    def _go_on_sending(self) -> None:
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send())

    async def _send(self) -> None:
        # One after the other: gRPC takes no second message while one is under way. What goes wrong shows where the call is read.
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, asyncio.CancelledError):
            # Without this a write can meet a call that has ended, and gRPC then forgets the status that it ended with.
            await self._call.initial_metadata()
            while self._outgoing and not self._call.done():
                await self._call.write(self._outgoing.popleft())
            if self._is_closing:
                await self._call.done_writing()

    async def _read(self) -> None:
        failure: BaseException = rpc_error(grpc.StatusCode.UNAVAILABLE, "the stream of streams ended")
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
        if isinstance(failure, asyncio.CancelledError):
            # Also when a program ends without having closed its client: its event loop waits for this.
            await settle()

    def _arrived(self, event: pb.MultiplexResponse.CallEvent) -> None:
        line = self._lines.get(event.call)
        if line is not None:  # else it was left while this was under way
            line.arrived(event)
