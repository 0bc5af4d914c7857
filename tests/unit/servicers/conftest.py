"""Both servicers over a fake desk, behind a real gRPC server on a unix socket."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import grpc
import pytest
from tokenmill.admin.v1.admin_pb2_grpc import AdminServiceStub, add_AdminServiceServicer_to_server
from tokenmill.inference.v1 import inference_pb2 as pb
from tokenmill.inference.v1.inference_pb2_grpc import (
    InferenceServiceStub,
    add_InferenceServiceServicer_to_server,
)
from tokenmill_client.call import StreamCall
from tokenmill_client.multiplex import Multiplexer
from tokenmill_client.retry import RetryPolicy
from tokenmill_client.transport import Transport
from tokenmill_scheduler.desk.records import ServedModel
from tokenmill_scheduler.intake import Intake
from tokenmill_scheduler.servicers.admin import AdminServicer
from tokenmill_scheduler.servicers.errors import ErrorInterceptor
from tokenmill_scheduler.servicers.inference import InferenceServicer

from tests.fakes.desk import FakeDesk
from tests.fakes.operators import FakeOperators
from tests.fakes.text_models import byte_level_model, byte_level_tokenizer

if TYPE_CHECKING:  # the stub classes for asyncio are the type checker's alone
    from tokenmill.admin.v1.admin_pb2_grpc import AdminServiceAsyncStub
    from tokenmill.inference.v1.inference_pb2_grpc import InferenceServiceAsyncStub

MAX_MESSAGE_BYTES = 2 << 20


@dataclass(frozen=True, slots=True)
class Served:
    desk: FakeDesk
    inference: InferenceServiceAsyncStub
    admin: AdminServiceAsyncStub
    servicer: InferenceServicer
    channel: grpc.aio.Channel


def served_model(name: str = "tiny", max_model_len: int = 4096, pool_tokens: int = 4096) -> ServedModel:
    vocab_size = byte_level_tokenizer().get_vocab_size()
    return ServedModel(name, byte_level_model(), max_model_len, vocab_size, pool_tokens, "digest", executors=1)


@pytest.fixture
def desk() -> FakeDesk:
    return FakeDesk(served_model())


class OverOneCall:
    """A stub whose streams share one Multiplex call, as those of the Python client do."""

    def __init__(self, address: str, stub: InferenceServiceAsyncStub) -> None:
        self._transport = Transport(address, timeout=10, retry=RetryPolicy())
        self._streams = Multiplexer(self._transport)
        self._stub = stub

    def __getattr__(self, name: str) -> object:
        return getattr(self._stub, name)

    def Generate(self, request: pb.GenerateRequest) -> StreamCall:  # noqa: N802 (as the stub has it)
        return self._streams.open(request, None)

    def Attach(self, request: pb.AttachRequest) -> StreamCall:  # noqa: N802 (as the stub has it)
        return self._streams.open(request, None)

    async def close(self) -> None:
        await self._streams.close()
        await self._transport.close()


@pytest.fixture
def multiplexed() -> bool:
    """Whether `served.inference` has its streams over one call; modules that test streams ask for both."""
    return False


@pytest.fixture
async def served(desk: FakeDesk, tmp_path: Path, multiplexed: bool) -> AsyncIterator[Served]:
    server = grpc.aio.server(interceptors=[ErrorInterceptor()], options=[("grpc.max_receive_message_length", MAX_MESSAGE_BYTES)])
    servicer = InferenceServicer(desk, Intake(desk))
    add_InferenceServiceServicer_to_server(servicer, server)
    add_AdminServiceServicer_to_server(AdminServicer(desk, FakeOperators()), server)
    address = f"unix:{tmp_path}/s"
    server.add_insecure_port(address)
    await server.start()
    async with grpc.aio.insecure_channel(address) as channel:
        stub = InferenceServiceStub(channel)
        over_one_call = OverOneCall(address, stub)
        inference = cast("InferenceServiceAsyncStub", over_one_call) if multiplexed else stub
        yield Served(desk, inference, AdminServiceStub(channel), servicer, channel)
        await over_one_call.close()
    await server.stop(None)
