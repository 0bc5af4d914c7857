"""The proxy passes bytes on, breaks connections and holds them up."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from benchmarks.chaos.proxy import Proxy

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1024):
        writer.write(data)
    writer.close()


@pytest.fixture
async def proxy() -> AsyncIterator[Proxy]:
    """In front of an echo."""
    with tempfile.TemporaryDirectory(prefix="tm-") as folder:
        path = str(Path(folder) / "echo.sock")
        server = await asyncio.start_unix_server(_echo, path)
        proxy = Proxy(lambda: path)
        await proxy.start()
        yield proxy
        await proxy.close()
        server.close()


async def connect(proxy: Proxy) -> Connection:
    host, _, port = proxy.address.rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def said(connection: Connection, words: bytes) -> bytes:
    reader, writer = connection
    writer.write(words)
    return await reader.readexactly(len(words))


async def test_bytes_pass_both_ways(proxy: Proxy) -> None:
    connection = await connect(proxy)
    assert await said(connection, b"words") == b"words"
    proxy.delay_s = 0.001
    assert await said(connection, b"late") == b"late"
    connection[1].transport.abort()


async def test_a_reset_breaks_what_is_open_and_new_connections_are_taken(proxy: Proxy) -> None:
    connection = await connect(proxy)
    assert await said(connection, b"words") == b"words"
    proxy.reset()
    with pytest.raises(ConnectionResetError):
        await connection[0].read(1)
    connection[1].transport.abort()
    again = await connect(proxy)
    assert await said(again, b"again") == b"again"
    again[1].transport.abort()


async def test_what_is_held_up_comes_later_and_whole(proxy: Proxy) -> None:
    connection = await connect(proxy)
    assert await said(connection, b"words") == b"words"
    proxy.hold()
    saying = asyncio.create_task(said(connection, b"held"))
    new = await connect(proxy)
    done, _ = await asyncio.wait([saying], timeout=0.05)
    assert not done
    proxy.release()
    assert await saying == b"held"
    assert await said(new, b"new") == b"new"
    for _, writer in (connection, new):
        writer.transport.abort()


async def test_a_service_that_is_away_breaks_the_connection(proxy: Proxy) -> None:
    away = Proxy(lambda: "/nowhere/at/all.sock")
    await away.start()
    reader, writer = await connect(away)
    with pytest.raises(ConnectionResetError):
        await reader.read(1)
    writer.transport.abort()
    await away.close()


@pytest.mark.parametrize("closes", [False, True])
async def test_a_connection_is_broken_that_is_taken_as_it_is_reset_or_closed(closes: bool) -> None:
    """Its task is cancelled before it has begun, or comes too late to be cancelled."""

    class Hurried(Proxy):
        def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self._closed = closes
            super()._accept(reader, writer)
            if not closes:
                self.reset()

    proxy = Hurried(lambda: "")
    await proxy.start()
    reader, writer = await connect(proxy)
    with pytest.raises(ConnectionResetError):
        async with asyncio.timeout(5):
            await reader.read(1)
    writer.transport.abort()
    await proxy.close()
