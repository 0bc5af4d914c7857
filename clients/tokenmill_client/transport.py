"""How calls are made: deadlines, typed errors, retries, and the next scheduler when one is lost. Must not know: what they mean."""

from __future__ import annotations

import asyncio
import random
import time
from typing import TypeVar, cast

import grpc

from tokenmill_client.call import settle
from tokenmill_client.channel import Channels, parse_addresses
from tokenmill_client.errors import NoSecureConnection, TokenmillError, Unavailable, from_rpc_error
from tokenmill_client.retry import Backoff, RetryPolicy
from tokenmill_client.security import Tls, call_metadata, channel_credentials

Q = TypeVar("Q")
R = TypeVar("R")


class Transport:
    """To one address, or to several with commas between them. Opens channels on first use, so that it may be made outside of an
    event loop.
    """

    def __init__(self, address: str, timeout: float, retry: RetryPolicy, token: str | None = None, tls: Tls | None = None) -> None:
        """Raises OSError or ValueError when the address, the files for TLS or the token are not right."""
        self.address = address
        # Sent by hand: gRPC's own call credentials refuse connections without TLS, unix sockets among them.
        self.metadata = call_metadata(token)
        credentials = None if tls is None else channel_credentials(tls)
        self._channels = Channels(parse_addresses(address), credentials)
        self.timeout_s = timeout
        self.retry = retry
        # Calls may have been cancelled, by whoever made them or by what is behind a stream.
        self.has_left_calls = False

    @property
    def channel(self) -> grpc.aio.Channel:
        """For stubs, which use no more of a channel than `Channels` has."""
        return cast("grpc.aio.Channel", self._channels)

    @property
    def current(self) -> str:
        """The address that the next call goes to."""
        return self._channels.current

    def leave(self, address: str) -> bool:
        """Turns to the next address, if there is one, after a failure at this one."""
        return self._channels.leave(address)

    async def close(self) -> None:
        await self._channels.close()
        if self.has_left_calls:
            await settle()

    async def call(self, method: grpc.aio.UnaryUnaryMultiCallable[Q, R], request: Q, timeout: float | None) -> R:
        """One call, tried again while the server is unavailable: every call of the protocol may be repeated."""
        deadline_s = time.monotonic() + (self.timeout_s if timeout is None else timeout)
        backoff = Backoff(self.retry)
        limit_s: float | None = None  # counted from the first failure
        while True:
            address = self.current
            try:
                return await method(request, timeout=max(0.0, deadline_s - time.monotonic()), metadata=self.metadata)
            except asyncio.CancelledError:
                self.has_left_calls = True
                raise
            except grpc.aio.AioRpcError as error:
                failure = self.typed(error)
                if limit_s is None:
                    limit_s = min(self.retry.call_limit_s, deadline_s - time.monotonic())
                await self.pause(backoff, failure, limit_s, address)

    async def pause(self, backoff: Backoff, failure: TokenmillError, limit_s: float, address: str) -> None:
        """Waits before the next try, at another address than the one that failed if there is one.

        Raises `failure` when trying again is of no use or has lasted `limit_s`.
        """
        if not isinstance(failure, Unavailable):
            raise failure
        # What one scheduler asks for says nothing of another.
        asked_s = 0.0 if self.leave(address) else failure.retry_delay_s or 0.0
        delay_s = backoff.next_delay_s(time.monotonic(), limit_s, random.random(), asked_s)
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
