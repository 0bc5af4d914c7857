"""One channel, and how calls on it are made: deadlines, typed errors, retries. Must not know: what the calls mean."""

from __future__ import annotations

import asyncio
import random
import time
from typing import TypeVar

import grpc

from tokenmill_client.channel import open_channel
from tokenmill_client.errors import TokenmillError, Unavailable, from_rpc_error
from tokenmill_client.retry import Backoff, RetryPolicy

Q = TypeVar("Q")
R = TypeVar("R")


class Transport:
    """Opens its channel on first use, so that it may be made outside of an event loop."""

    def __init__(self, address: str, timeout: float, retry: RetryPolicy) -> None:
        self.address = address
        self.timeout_s = timeout
        self.retry = retry
        self._channel: grpc.aio.Channel | None = None

    @property
    def channel(self) -> grpc.aio.Channel:
        if self._channel is None:
            self._channel = open_channel(self.address)
        return self._channel

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close(None)

    async def call(self, method: grpc.aio.UnaryUnaryMultiCallable[Q, R], request: Q, timeout: float | None) -> R:
        """One call, tried again while the server is unavailable: every call of the protocol may be repeated."""
        deadline_s = time.monotonic() + (self.timeout_s if timeout is None else timeout)
        backoff = Backoff(self.retry)
        while True:
            try:
                return await method(request, timeout=max(0.0, deadline_s - time.monotonic()))
            except grpc.aio.AioRpcError as error:
                failure = self.typed(error)
                limit_s = min(self.retry.call_limit_s, deadline_s - time.monotonic())
                await self.pause(backoff, failure, limit_s)

    async def pause(self, backoff: Backoff, failure: TokenmillError, limit_s: float) -> None:
        """Waits before the next try, or raises `failure` when trying again is of no use or has lasted `limit_s`."""
        if not isinstance(failure, Unavailable):
            raise failure
        delay_s = backoff.next_delay_s(time.monotonic(), limit_s, random.random(), failure.retry_delay_s or 0.0)
        if delay_s is None:
            raise failure
        await asyncio.sleep(delay_s)

    def typed(self, error: grpc.aio.AioRpcError) -> TokenmillError:
        failure = from_rpc_error(error)
        if isinstance(failure, Unavailable) and failure.retry_delay_s is None:
            # gRPC speaks of sockets and subchannels here; its words stay in the cause.
            failure = Unavailable(f"Nothing answers at {self.address}.", code=failure.code)
        failure.__cause__ = error
        return failure
