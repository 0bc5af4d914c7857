"""A TCP address in front of a service's unix socket, whose connections can be broken, held up and slowed.

Must not know: what the bytes mean.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from contextlib import suppress

_CHUNK_BYTES = 64 * 1024
# Closing a socket that lingers for 0 s sends a reset instead of a goodbye.
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class Proxy:
    """Each connection to `address` has one of its own to the socket that `upstream` names at that moment."""

    def __init__(self, upstream: Callable[[], str]) -> None:
        self.address = ""
        self.delay_s = 0.0
        self._upstream = upstream
        self._flows = asyncio.Event()
        self._flows.set()
        self._connections: set[asyncio.Task[None]] = set()
        self._closed = False
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        self.address = f"{host}:{port}"

    async def close(self) -> None:
        assert self._server is not None
        self._closed = True
        self._server.close()
        self.reset()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def reset(self) -> None:
        """Breaks all connections; new ones are taken."""
        for connection in self._connections:
            connection.cancel()

    def hold(self) -> None:
        """Takes connections and bytes, passes nothing on."""
        self._flows.clear()

    def release(self) -> None:
        self._flows.set()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._closed:  # One that was on its way.
            _break_off(writer)
            return
        task = asyncio.create_task(self._carry(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)
        # Not in the task, which may be cancelled before it has begun.
        task.add_done_callback(lambda _: _break_off(writer))

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._flows.wait()
            up_reader, up_writer = await asyncio.open_unix_connection(self._upstream())
            pumps = [asyncio.create_task(self._pump(reader, up_writer)), asyncio.create_task(self._pump(up_reader, writer))]
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for pump in pumps:
                    pump.cancel()
                _break_off(up_writer)
        except OSError:
            pass  # The service is not there.

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while chunk := await reader.read(_CHUNK_BYTES):
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                await self._flows.wait()
                writer.write(chunk)
                await writer.drain()
        except OSError:
            pass  # One end is gone; the other is told by `_carry`.


def _break_off(writer: asyncio.StreamWriter) -> None:
    connection = writer.get_extra_info("socket")
    with suppress(OSError):  # It is closed already.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
    writer.transport.abort()
