"""One stream's part of an `Exchange`, read and cancelled as a call of its own is.

Must not know: the other lines, what events mean.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING
from weakref import ref

import grpc
from tokenmill.inference.v1 import inference_pb2 as pb

from tokenmill_client.call import Request, StreamCall, end_of_call, is_unimplemented, rpc_error

if TYPE_CHECKING:
    from tokenmill_client.exchange import Exchange

# A line that nobody reads is paused when so much waits, and goes on when half of it is read.
_PAUSE_EVENTS = 64
_PAUSE_BYTES = 1 << 20


class Line:
    """A `StreamCall`. As a gRPC call does, it ends when nobody holds it any more."""

    def __init__(
        self, exchange: Exchange, request: Request, timeout_s: float | None, fall_back: Callable[[float | None], StreamCall]
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
        # Of who waits in a read. (An event takes three times the calls.)
        self._reader: asyncio.Future[None] | None = None
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
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        if self._events:
            return self._next()
        assert self._failure is not None
        if not self._is_known and is_unimplemented(self._failure):
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
        if self._events:
            self._queue(event)
        else:
            # While somebody reads nothing waits, and no time is spent on counting.
            self._events.append((event, 0))
            self._wake()

    def _queue(self, event: pb.MultiplexResponse.CallEvent) -> None:
        size_bytes = event.ByteSize()
        self._events.append((event, size_bytes))
        self._waiting_bytes += size_bytes
        if not self._is_paused and not self.is_over and self._waits_for(_PAUSE_EVENTS, _PAUSE_BYTES):
            self._is_paused = True
            self._exchange.send(pb.MultiplexRequest(call=self._number, pause=pb.MultiplexRequest.Pause()))

    def fail(self, failure: BaseException) -> None:
        self._over()
        self._failure = failure
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

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
            return end_of_call(event.status)
        self._events.popleft()
        self._waiting_bytes -= size_bytes
        if self._is_paused and not self.is_over and not self._waits_for(_PAUSE_EVENTS // 2, _PAUSE_BYTES // 2):
            self._is_paused = False
            self._exchange.send(pb.MultiplexRequest(call=self._number, resume=pb.MultiplexRequest.Resume()))
        return event

    def _left_s(self) -> float | None:
        return None if self._deadline_s is None else max(0.0, self._deadline_s - asyncio.get_running_loop().time())


def _expire(held: ref[Line]) -> None:
    line = held()
    if line is not None:
        line.leave(rpc_error(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"))
