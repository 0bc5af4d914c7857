"""`InferenceService.Multiplex`: the calls of one client over one stream.

A message a stream and commit is most of what a scheduler does for many streams. Here each call is a task that fills what it has to
tell straight into the one message that goes out next. A client that reads slowly finds more tokens in each event, as on a stream of
its own: a call brings its next event only once its last one is on its way. Must not know: the desk, what the events are.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass
from functools import partial

from google.rpc.status_pb2 import Status
from tokenmill.inference.v1 import inference_pb2 as pb

from tokenmill_scheduler.desk.errors import QueueFull, Unavailable
from tokenmill_scheduler.intake import InvalidArgument

MAX_CALLS = 4_096
# A message that has come to this size is complete: with its last event far below what clients take, and above what a commit brings.
_FULL_BYTES = 1 << 18

CallEvent = pb.MultiplexResponse.CallEvent
# The events of a call, made in place by what makes new ones. To leave it ends the call.
Begin = Callable[[pb.MultiplexRequest, Callable[[], CallEvent]], AbstractAsyncContextManager[AsyncGenerator[CallEvent, None]]]
# What a client is told of an error, whether or not the call had told anything before.
Tell = Callable[[Exception, pb.MultiplexRequest, bool], Status]


class Outbox:
    """The messages that go out next. `add` an event, fill it in, then say that it is `added`, with nothing awaited in between."""

    def __init__(self) -> None:
        self._sealed: deque[pb.MultiplexResponse] = deque()
        self._open = pb.MultiplexResponse()
        self._open_bytes = 0
        self._incomplete = False
        self._sending = False
        self._closed = False
        self._filled = asyncio.Event()
        # A message has gone out: for those who have just added something, and for those who have waited longer.
        self._sent = asyncio.Event()
        self._advanced = asyncio.Event()

    def add(self, call: int) -> CallEvent:
        self._incomplete = True
        return self._open.events.add(call=call)

    async def added(self, event: CallEvent) -> None:
        """Returns when its call may bring another one: at once, while the client keeps up."""
        self._complete(event)
        if self._sending:
            await self._sent.wait()
        if self._sealed:
            await self.has_room()

    async def has_room(self) -> None:
        """Returns when no message waits behind the one that is under way. Those who wait have their turns in order."""
        while self._sealed:
            await self._advanced.wait()

    def end(self, call: int, status: Status | None) -> None:
        """The last of a call. `status` says why it failed; what it was just filling in is dropped."""
        if self._incomplete:
            del self._open.events[-1]
        # Empty bytes are set, too: that is how a client knows the end.
        self._complete(self._open.events.add(call=call, status=b"" if status is None else status.SerializeToString()))

    def close(self) -> None:
        """No more comes; what is there still goes out."""
        self._closed = True
        self._filled.set()

    async def messages(self) -> AsyncGenerator[pb.MultiplexResponse, None]:
        while True:
            await self._filled.wait()
            self._filled.clear()
            while (message := self._take()) is not None:
                self._sending = True
                yield message
                self._sending = False
                # Wakes those who wait now, the longest first, and stays clear.
                for waited_for in (self._advanced, self._sent):
                    waited_for.set()
                    waited_for.clear()
            if self._closed:
                return

    def _complete(self, event: CallEvent) -> None:
        self._incomplete = False
        self._open_bytes += event.ByteSize()
        if self._open_bytes >= _FULL_BYTES:
            self._sealed.append(self._open)
            self._begin()
        self._filled.set()

    def _take(self) -> pb.MultiplexResponse | None:
        if self._sealed:
            return self._sealed.popleft()
        if not self._open.events:
            return None
        message = self._open
        self._begin()
        return message

    def _begin(self) -> None:
        self._open, self._open_bytes = pb.MultiplexResponse(), 0


@dataclass(frozen=True, slots=True)
class _Call:
    """`wanted` is clear while the client has paused it."""

    task: asyncio.Task[None]
    wanted: asyncio.Event

    def heed(self, action: str) -> None:
        """One of leave, pause and resume."""
        match action:
            case "leave":
                self.task.cancel()
            case "pause":
                self.wanted.clear()
            case "resume":
                self.wanted.set()


class Multiplexed:
    """One client's stream of calls. `begin` starts what a call is to do, `tell` puts an error into words."""

    def __init__(self, begin: Begin, tell: Tell) -> None:
        self._begin = begin
        self._tell = tell
        self._outbox = Outbox()
        self._calls: dict[int, _Call] = {}
        self._closing: Unavailable | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    async def run(self, requests: AsyncIterator[pb.MultiplexRequest]) -> AsyncGenerator[pb.MultiplexResponse, None]:
        """Until the client asks for no more and all calls have ended. Raises InvalidArgument for what breaks the protocol."""
        reading = asyncio.create_task(self._read(requests))
        reading.add_done_callback(lambda _: self._outbox.close())
        try:
            async with aclosing(self._outbox.messages()) as messages:
                async for message in messages:
                    yield message
            if self._closing is not None:
                raise self._closing
            await reading
        finally:
            tasks = [reading, *[call.task for call in self._calls.values()]]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def close(self, reason: Unavailable) -> None:
        """Ends the stream with `reason` when its calls have ended."""
        self._closing = reason
        for call in self._calls.values():
            call.wanted.set()
        await self._idle.wait()
        self._outbox.close()

    async def _read(self, requests: AsyncIterator[pb.MultiplexRequest]) -> None:
        async for request in requests:
            self._handle(request)
            # What fails at once brings its end only: who reads no answers could have any number of those waiting.
            await self._outbox.has_room()
        await self._idle.wait()

    def _handle(self, request: pb.MultiplexRequest) -> None:
        call = self._calls.get(request.call)
        action = request.WhichOneof("action")
        if action is None:
            raise InvalidArgument.of("action", "one of generate, attach, leave, pause and resume is needed")
        if action in ("generate", "attach"):
            if call is not None:
                raise InvalidArgument.of("call", f"{request.call} is open already: give each call a number of its own")
            self._open(request)
        elif call is not None and self._closing is None:  # else it has ended meanwhile, or is about to
            call.heed(action)

    def _open(self, request: pb.MultiplexRequest) -> None:
        if len(self._calls) >= MAX_CALLS:
            too_many = QueueFull(f"{MAX_CALLS} calls are open on this stream: open another stream", None, "calls")
            self._outbox.end(request.call, self._tell(too_many, request, False))
            return
        wanted = asyncio.Event()
        wanted.set()
        task = asyncio.create_task(self._carry_out(request, wanted))
        task.add_done_callback(partial(self._over, request.call))
        self._calls[request.call] = _Call(task, wanted)
        self._idle.clear()

    async def _carry_out(self, request: pb.MultiplexRequest, wanted: asyncio.Event) -> None:
        told, status = False, None
        try:
            async with self._begin(request, partial(self._outbox.add, request.call)) as events:
                async for event in events:
                    told = True
                    await self._outbox.added(event)
                    if not wanted.is_set():
                        await wanted.wait()
        except Exception as error:
            status = self._tell(error, request, told)
        self._outbox.end(request.call, status)

    def _over(self, number: int, task: asyncio.Task[None]) -> None:
        del self._calls[number]
        if not self._calls:
            self._idle.set()
