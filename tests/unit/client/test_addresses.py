"""A client that was given the addresses of several schedulers."""

from __future__ import annotations

import asyncio

import pytest
from tokenmill_client import AsyncClient, Unavailable
from tokenmill_client.channel import Channels

from tests.unit.client.conftest import QUICK
from tests.unit.client.fake_server import FakeServer, whole_text

# Nothing listens there.
DEAD, ALSO_DEAD = "127.0.0.1:1", "127.0.0.1:2"


async def test_calls_and_streams_go_to_the_address_that_answers(server: FakeServer) -> None:
    async with AsyncClient(f"{DEAD}, {server.address}", retry=QUICK) as client:
        await client.wait_ready()
        submitted = await client.submit("hello", max_tokens=2)
        assert (await client.get_request(submitted.request_id)).info.request_id == submitted.request_id
    async with AsyncClient(f"{DEAD},{ALSO_DEAD},{DEAD},{server.address}", retry=QUICK) as client:
        streams = [client.generate("hello", max_tokens=3) for _ in range(4)]
        outputs = await asyncio.gather(*[stream.result() for stream in streams])
        assert [output.text for output in outputs] == [whole_text(output.request_id, 3) for output in outputs]


async def test_none_that_answers_is_unavailable() -> None:
    async with AsyncClient(f"{DEAD},{ALSO_DEAD}", retry=QUICK) as client:
        with pytest.raises(Unavailable, match=r"Nothing answers at 127\.0\.0\.1:1,127\.0\.0\.1:2"):
            await client.list_models()


def test_those_that_fail_together_turn_once() -> None:
    channels = Channels(("a", "b"), None)
    assert channels.leave("a")
    assert channels.leave("a"), "this call too goes on elsewhere"
    assert channels.current == "b"
    assert channels.leave("b")
    assert channels.current == "a"
    assert not Channels(("a",), None).leave("a")


@pytest.mark.parametrize("bad", ["", "nonsense", "127.0.0.1", "host:", "127.0.0.1:7600,nonsense"])
def test_what_can_be_no_address_is_refused_at_once(bad: str) -> None:
    with pytest.raises(ValueError, match="is neither HOST:PORT nor unix:PATH"):
        AsyncClient(bad)
