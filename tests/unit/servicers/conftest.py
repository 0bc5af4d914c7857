"""Both servicers over a fake desk, behind a real gRPC server on a unix socket."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import pytest
from tokenmill.admin.v1.admin_pb2_grpc import AdminServiceStub, add_AdminServiceServicer_to_server
from tokenmill.inference.v1.inference_pb2_grpc import (
    InferenceServiceStub,
    add_InferenceServiceServicer_to_server,
)
from tokenmill_scheduler.desk import ServedModel
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


@pytest.fixture
async def served(desk: FakeDesk, tmp_path: Path) -> AsyncIterator[Served]:
    server = grpc.aio.server(interceptors=[ErrorInterceptor()], options=[("grpc.max_receive_message_length", MAX_MESSAGE_BYTES)])
    servicer = InferenceServicer(desk, Intake(desk))
    add_InferenceServiceServicer_to_server(servicer, server)
    add_AdminServiceServicer_to_server(AdminServicer(desk, FakeOperators()), server)
    address = f"unix:{tmp_path}/s"
    server.add_insecure_port(address)
    await server.start()
    async with grpc.aio.insecure_channel(address) as channel:
        yield Served(desk, InferenceServiceStub(channel), AdminServiceStub(channel), servicer, channel)
    await server.stop(None)
