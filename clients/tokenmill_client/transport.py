"""One channel, and how calls on it are made: deadlines, typed errors, retries. Must not know: what the calls mean."""

from __future__ import annotations

import asyncio
import random
import time
from typing import TypeVar

import grpc

from tokenmill_client.channel import open_channel
from tokenmill_client.errors import NoSecureConnection, TokenmillError, Unavailable, from_rpc_error
from tokenmill_client.retry import Backoff, RetryPolicy
from tokenmill_client.security import Tls, call_metadata, channel_credentials

Q = TypeVar("Q")
R = TypeVar("R")


class Transport:
    """Opens its channel on first use, so that it may be made outside of an event loop."""

    def __init__(self, address: str, timeout: float, retry: RetryPolicy, token: str | None = None, tls: Tls | None = None) -> None:
        """Raises OSError or ValueError when the files for TLS or the token are not right."""
        self.address = address
        # Sent by hand: gRPC's own call credentials refuse connections without TLS, unix sockets among them.
        self.metadata = call_metadata(token)
        self._credentials = None if tls is None else channel_credentials(tls)
        self.timeout_s = timeout
        self.retry = retry
        self._channel: grpc.aio.Channel | None = None

    @property
    def channel(self) -> grpc.aio.Channel:
        if self._channel is None:
            self._channel = open_channel(self.address, self._credentials)
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
                return await method(request, timeout=max(0.0, deadline_s - time.monotonic()), metadata=self.metadata)
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
            failure = self._unreachable(error.details() or "", failure.code)
        failure.__cause__ = error
        return failure

    def _unreachable(self, details: str, code: str) -> Unavailable:
        if "handshake failed" in details or "Verification Check failed" in details:
            words = f"No TLS connection to {self.address}: is its certificate of the authority given, and for this name?"
            return NoSecureConnection(words, code=code)
        if "failed to connect" in details and "Socket closed" in details:
            words = f"{self.address} hangs up on this connection: does it want TLS, or another client certificate?"
            return NoSecureConnection(words, code=code)
        return Unavailable(f"Nothing answers at {self.address}.", code=code)
