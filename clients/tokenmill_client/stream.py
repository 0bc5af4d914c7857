"""A stream of output tokens that takes itself up again when the connection or the scheduler is lost."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from types import TracebackType
from typing import Self

import grpc

from tokenmill_client.call import StreamCall
from tokenmill_client.errors import DeadlineExceeded, NoSecureConnection, StreamLost, TokenmillError, Unavailable, from_finished
from tokenmill_client.progress import Progress, total_usage
from tokenmill_client.records import Delta, Output, StreamEvent, Usage
from tokenmill_client.retry import Backoff
from tokenmill_client.transport import Transport
from tokenmill_client.wire import incoming

_log = logging.getLogger("tokenmill_client")

# An outage that is over sooner is worth no word.
_TOLD_AFTER_S = 1.0
# A server that does not end a stream behind its last event is not waited for.
_LAST_READ_LIMIT_S = 1.0

# Starts the call that goes on from where `Progress` stands, with a timeout in seconds or none.
Connect = Callable[[Progress, float | None], StreamCall]


class AsyncStream(AsyncIterator[Delta]):
    """Iterate it for deltas, or await `result()` for all at once. The call starts with the first of these.

    Of a request for several choices, each delta says whose it is, `results()` gives all outputs, and `result()` that of the first,
    which is the best where the best were asked for.

    Each output token comes once, in order, also when the scheduler restarts in mid-stream; if the server breaks that rule,
    BrokenStream is raised. A request that ends other than DONE raises RequestFailed, RequestCancelled or RequestExpired with the
    output so far. Leave early with `aclose()` or `async with`: the server then cancels a request that is not detached.
    A cancelled read (`asyncio.timeout` around it, too) closes the stream. To a scheduler that lives on, a lost connection is the
    same as leaving: what must outlive one is asked for with `detached=True`. While nobody answers it goes on trying, until its
    timeout, or without one for `RetryPolicy.attach_limit_s`, five minutes; StreamLost then says where to attach later.
    """

    def __init__(self, transport: Transport, connect: Connect, progress: Progress, timeout: float | None) -> None:
        self._transport = transport
        self._connect = connect
        self._progress = progress
        self._deadline_s = None if timeout is None else time.monotonic() + timeout
        self._backoff = Backoff(transport.retry)
        self._call: StreamCall | None = None
        self._address = transport.current
        # When the connection was lost that is not yet made good.
        self._lost_s: float | None = None
        self._outage_told = False
        self._closed = False

    @property
    def request_id(self) -> str:
        return self._progress.request_id

    @property
    def output(self) -> Output:
        """What has come so far, of the first choice."""
        return self._progress.output

    @property
    def outputs(self) -> tuple[Output, ...]:
        """What has come so far, of each choice; how many there are is known with the first delta."""
        return self._progress.outputs

    @property
    def usage(self) -> Usage:
        """Of all choices, their prompt counted once."""
        return total_usage(self._progress.outputs)

    async def result(self) -> Output:
        """Reads to the end."""
        return (await self.results())[0]

    async def results(self) -> tuple[Output, ...]:
        """As `result`, of each choice."""
        async for _ in self:
            pass
        return self._progress.outputs

    async def __anext__(self) -> Delta:
        while not self._closed:
            try:
                delta = self._progress.take(await self._next_event())
            except BaseException:
                await self.aclose()
                raise
            if delta is not None:
                self._backoff.reset()
                return delta
            if self._progress.is_over:
                await self._hang_up()
                self._raise_unless_done()
        raise StopAsyncIteration

    async def aclose(self) -> None:
        self._closed = True
        if self._call is not None:
            self._call.cancel()
            self._call = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.aclose()

    async def _hang_up(self) -> None:
        """Reads the call's status, right behind its last event: gRPC is then done with it, as it is not yet after a cancel."""
        if self._call is not None:
            with suppress(grpc.aio.AioRpcError, TimeoutError):
                async with asyncio.timeout(_LAST_READ_LIMIT_S):
                    await self._call.read()
        await self.aclose()

    def _raise_unless_done(self) -> None:
        """The first choice that is not stands for all."""
        for finished, output in self._progress.endings:
            error = from_finished(finished, output)
            if error is not None:
                raise error

    async def _next_event(self) -> StreamEvent:
        """The next event of this connection, or of a new one when it is lost."""
        while True:
            try:
                event = incoming.stream_event(await self._connected().read())
                if event is None:
                    raise Unavailable(f"The stream of request {self.request_id} ended before the request did.")
            except grpc.aio.AioRpcError as error:
                failure = self._transport.typed(error)
            except Unavailable as error:
                failure = error
            else:
                if self._lost_s is not None:
                    self._made_good(self._lost_s)
                return event
            await self._await_next_try(failure)

    def _connected(self) -> StreamCall:
        if self._call is None:
            self._progress.reconnected()
            self._address = self._transport.current
            self._call = self._connect(self._progress, self._remaining_s())
        return self._call

    def _made_good(self, lost_s: float) -> None:
        level = logging.INFO if self._outage_told else logging.DEBUG
        after_s = time.monotonic() - lost_s
        next_index = self._progress.next_index
        _log.log(level, "stream of request %s taken up again at token %d after %.2f s", self.request_id, next_index, after_s)
        self._lost_s, self._outage_told = None, False

    async def _await_next_try(self, failure: TokenmillError) -> None:
        self._call = None
        self._tell_outage(failure)
        try:
            await self._transport.pause(self._backoff, failure, self._limit_s(failure), self._address)
        except Unavailable as given_up:
            raise self._final(given_up) from given_up

    def _tell_outage(self, failure: TokenmillError) -> None:
        """Once, of one that lasts."""
        now_s = time.monotonic()
        if self._lost_s is None:
            self._lost_s = now_s
        if self._progress.accepted and not self._outage_told and now_s - self._lost_s >= _TOLD_AFTER_S:
            self._outage_told = True
            next_index = self._progress.next_index
            _log.info("stream of request %s waits for a scheduler at token %d: %s", self.request_id, next_index, failure)

    def _limit_s(self, failure: TokenmillError) -> float:
        """For how long to go on trying."""
        retry = self._transport.retry
        # No machine that boots cures a certificate.
        if not self._progress.accepted or isinstance(failure, NoSecureConnection):
            return retry.call_limit_s
        return retry.attach_limit_s if self._deadline_s is None else math.inf

    def _final(self, failure: Unavailable) -> Unavailable:
        """What a stream ends with that is given up."""
        if not self._progress.accepted or isinstance(failure, NoSecureConnection):
            return failure
        next_index = min(self._progress.next_indexes)
        message = f"{failure} The stream of request {self.request_id} is given up at token {next_index}: attach there again later."
        return StreamLost(message, self.request_id, next_index, code=failure.code)

    def _remaining_s(self) -> float | None:
        if self._deadline_s is None:
            return None
        remaining_s = self._deadline_s - time.monotonic()
        if remaining_s <= 0:
            raise DeadlineExceeded(f"Request {self.request_id} did not end within the time given.")
        return remaining_s
