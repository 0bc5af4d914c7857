"""A limit on messages below what clients share a call with: who is over it is refused alone, and told which field is too large."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from google.protobuf.message import Message
from tokenmill.inference.v1 import inference_pb2 as pb
from tokenmill.inference.v1.inference_pb2_grpc import add_InferenceServiceServicer_to_server
from tokenmill.inference.v1.types_pb2 import SamplingParams
from tokenmill_client import AsyncClient, ResourceExhausted
from tokenmill_client.multiplex import _MAX_SHARED_BYTES
from tokenmill_scheduler.access import Access
from tokenmill_scheduler.core.request import State
from tokenmill_scheduler.grpc_server import new_server
from tokenmill_scheduler.intake import Intake
from tokenmill_scheduler.servicers.inference import InferenceServicer
from tokenmill_scheduler.servicers.sizes import MAX_SHARED_BYTES, largest_field
from tokenmill_scheduler.tenants import TenantLimits

from tests.fakes.desk import FakeDesk
from tests.unit.servicers.calls import spec

LIMIT_BYTES = 64 << 10


@dataclass
class Narrow:
    """A server that takes little at a time."""

    client: AsyncClient
    desk: FakeDesk
    refused: list[str] = field(default_factory=list)


@pytest.fixture
async def narrow(desk: FakeDesk, tmp_path: Path) -> AsyncIterator[Narrow]:
    async with AsyncClient(f"unix:{tmp_path}/s") as client:
        narrow = Narrow(client, desk)
        server = new_server(Access(None, TenantLimits()), narrow.refused.append, LIMIT_BYTES)
        servicer = InferenceServicer(desk, Intake(desk), narrow.refused.append, LIMIT_BYTES)
        add_InferenceServiceServicer_to_server(servicer, server)
        server.add_insecure_port(client.address)
        await server.start()
        yield narrow
        await server.stop(None)


async def test_c57_a_stream_that_is_too_large_leaves_the_others_of_its_client_open(narrow: Narrow) -> None:
    """They are not taken up again, either: to lose its one reader would cancel this request."""
    stream = narrow.client.generate(token_ids=[5, 6, 7], request_id="a", max_tokens=2)
    reading = asyncio.ensure_future(anext(stream))
    await narrow.desk.until(lambda: narrow.desk.open_streams == 1)
    for size in (LIMIT_BYTES, MAX_SHARED_BYTES - 100):
        with pytest.raises(ResourceExhausted, match="at most 65,536 are taken") as refused:
            await narrow.client.generate("x" * size).result()
        assert [field for field, _ in refused.value.violations] == ["request.prompt.text"]
    assert narrow.refused == ["MESSAGE_TOO_LARGE"] * 2
    with pytest.raises(ResourceExhausted):
        await narrow.client.generate("x" * 2 * MAX_SHARED_BYTES).result()
    narrow.desk.produce("a", 2)
    await reading
    await stream.result()
    assert narrow.desk.entries["a"].state is State.DONE


async def test_c57_any_other_call_that_is_too_large_is_told_the_field(narrow: Narrow) -> None:
    with pytest.raises(ResourceExhausted) as submitted:
        await narrow.client.submit("x" * LIMIT_BYTES)
    assert [field for field, _ in submitted.value.violations] == ["request.prompt.text"]
    with pytest.raises(ResourceExhausted) as tokenized:
        await narrow.client.tokenize("x" * LIMIT_BYTES)
    assert [field for field, _ in tokenized.value.violations] == ["prompt.text"]
    assert narrow.refused == ["MESSAGE_TOO_LARGE"], "only submits are counted"
    just_under = await narrow.client.tokenize("x" * (LIMIT_BYTES - 100))
    assert len(just_under.token_ids) > LIMIT_BYTES - 100


def test_what_clients_share_a_call_with_is_in_the_protocol() -> None:
    assert MAX_SHARED_BYTES == _MAX_SHARED_BYTES


@pytest.mark.parametrize(
    ("message", "path"),
    [
        (pb.GenerateRequest(), ""),
        (pb.GenerateRequest(request=spec([5] * 100)), "request.prompt.token_ids.ids"),
        (pb.SubmitRequest(request=spec([5], SamplingParams(stop=["a" * 100, "b"]))), "request.sampling.stop"),
        (
            pb.SubmitRequest(request=spec([5], SamplingParams(logit_bias={1: 1.0, 2: 1.0}))),
            "request.sampling.logit_bias",
        ),
        (pb.SubmitRequest(request=spec([5], request_id="a" * 100)), "request.request_id"),
        (pb.AttachRequest(request_id="a", next_indexes=range(100)), "next_indexes"),
    ],
)
def test_the_largest_field(message: Message, path: str) -> None:
    assert largest_field(message) == path
