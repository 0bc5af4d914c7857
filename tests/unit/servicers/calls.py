"""Short ways to make requests and to read what came back."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status
from tokenmill.inference.v1 import inference_pb2 as pb
from tokenmill.inference.v1.types_pb2 import SamplingParams, StreamEvent

M = TypeVar("M", bound=Message)


def spec(prompt: Sequence[int] | pb.Prompt = (5, 6, 7), sampling: SamplingParams | None = None, **fields: Any) -> pb.RequestSpec:
    if not isinstance(prompt, pb.Prompt):
        prompt = pb.Prompt(token_ids=pb.TokenIds(ids=prompt))
    return pb.RequestSpec(prompt=prompt, sampling=sampling or SamplingParams(max_tokens=8), **fields)


def both() -> pb.OutputOptions:
    return pb.OutputOptions(text=True, token_ids=True)


async def next_event(call: Any) -> StreamEvent:
    response = await call.read()
    event: StreamEvent = response.event
    return event


async def events(call: Any) -> list[StreamEvent]:
    """All that are left, to the end of the stream."""
    found = []
    while (response := await call.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]  # not in the stubs
        found.append(response.event)
    return found


async def refusal(call: Awaitable[object]) -> grpc.aio.AioRpcError:
    """The error that a unary call, or the first read of a stream, ends in."""
    try:
        answer = await call
    except grpc.aio.AioRpcError as error:
        return error
    raise AssertionError(f"answered {answer}")


def details(error: grpc.aio.AioRpcError) -> status_pb2.Status:
    status = rpc_status.from_call(error)  # type: ignore[arg-type]  # it has what is read of a Call
    assert status is not None
    return status


def detail(error: grpc.aio.AioRpcError, kind: type[M]) -> M:
    """The one rich detail of this kind."""
    found = kind()
    assert [packed.Unpack(found) for packed in details(error).details].count(True) == 1
    return found


def violations(error: grpc.aio.AioRpcError) -> dict[str, str]:
    """Field → description."""
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    bad_request = error_details_pb2.BadRequest()
    for packed in details(error).details:
        packed.Unpack(bad_request)
    return {violation.field: violation.description for violation in bad_request.field_violations}
