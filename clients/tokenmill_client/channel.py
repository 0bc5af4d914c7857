"""gRPC channels and their options, and several of them used as one. Must not know: what is called on them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import grpc

MAX_MESSAGE_BYTES = 64 * 1024 * 1024

_OPTIONS: tuple[tuple[str, int], ...] = (
    # gRPC's default receive limit, 4 MiB, is less than a long output with log probabilities.
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # No pings that measure the bandwidth: they wake threads on both sides, and a message opens the window it needs.
    ("grpc.http2.bdp_probe", 0),
    # A frozen peer shows after time + timeout; the second timeout is the transport's own, 60 s unless set. The scheduler allows
    # such pings; a server with gRPC's defaults would end an idle stream with "Too many pings", and it would be taken up again.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    # gRPC waits 1 s, then up to 2 minutes, before it connects again, and fails all calls meanwhile: too long for a scheduler that
    # is back in one second. It comes on top of the client's own waits (retry.py), but is one a connection, whatever its streams.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 250),
)


# Of gRPC's names for a target; `unix:` is the one that people write by hand.
_SCHEMES = ("unix:", "dns:", "ipv4:", "ipv6:", "xds:")


def parse_addresses(text: str) -> tuple[str, ...]:
    """The addresses in `text`, with commas between them, each once. Raises ValueError for one that can be none."""
    addresses = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    for address in addresses:
        if not address.startswith(_SCHEMES) and not re.fullmatch(r".+:\d{1,5}", address):
            raise ValueError(f"{address!r} is neither HOST:PORT nor unix:PATH.")
    return addresses


def open_channel(address: str, credentials: grpc.ChannelCredentials | None = None) -> grpc.aio.Channel:
    """A channel to `host:port`, over TLS if there are credentials, or to `unix:PATH`, which needs none.

    Connects on first use; must be called in its event loop's thread.
    """
    # A proxy set for the web (http_proxy) is not meant for a service on this machine.
    local = address.startswith(("unix:", "127.", "localhost", "[::1]"))
    options = (*_OPTIONS, ("grpc.enable_http_proxy", 0)) if local else _OPTIONS
    if credentials is None or address.startswith("unix:"):
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, credentials, options=options)


class Channels:
    """What a stub needs of a channel, over those to several schedulers of one service: each call goes to the current one."""

    def __init__(self, addresses: tuple[str, ...], credentials: grpc.ChannelCredentials | None) -> None:
        """Each channel is opened when it is first used."""
        self.current = addresses[0]
        self._addresses = addresses
        self._credentials = credentials
        self._channels: dict[str, grpc.aio.Channel] = {}

    def leave(self, address: str) -> bool:
        """Turns to the next one after `address` failed, unless that was done already. False if there is no other."""
        if address == self.current:
            self.current = self._addresses[(self._addresses.index(address) + 1) % len(self._addresses)]
        return address != self.current

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close(None)

    def unary_unary(self, *method: Any, **codec: Any) -> Callable[..., Any]:
        return lambda request, **options: self._channel().unary_unary(*method, **codec)(request, **options)

    def unary_stream(self, *method: Any, **codec: Any) -> Callable[..., Any]:
        return lambda request, **options: self._channel().unary_stream(*method, **codec)(request, **options)

    def stream_stream(self, *method: Any, **codec: Any) -> Callable[..., Any]:
        return lambda *requests, **options: self._channel().stream_stream(*method, **codec)(*requests, **options)

    def _channel(self) -> grpc.aio.Channel:
        if self.current not in self._channels:
            self._channels[self.current] = open_channel(self.current, self._credentials)
        return self._channels[self.current]
