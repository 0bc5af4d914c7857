"""What a stream uses of the call that brings it: gRPC's own, or a `Line` that looks like one. Must not know: what events mean."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Protocol

import grpc
from google.rpc.status_pb2 import Status
from tokenmill.inference.v1 import inference_pb2 as pb

Request = pb.GenerateRequest | pb.AttachRequest
END: object = grpc.aio.EOF  # type: ignore[attr-defined]  # not in the stubs

_CODES: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}


# For a call that was cancelled here. It takes a millisecond, on a machine at work.
SETTLE_S = 0.05


async def settle() -> None:
    """Lets gRPC finish with calls that were cancelled, as it does behind our back.

    All event loops share one queue of what it tells them (grpc/grpc pull request 23377). What is for a loop that has been closed
    meanwhile it raises in whichever runs next, and what is behind it in the queue has to wait.
    """
    await asyncio.sleep(SETTLE_S)


class StreamCall(Protocol):
    """What is used of a running gRPC call. `read` gives a response, or gRPC's end mark."""

    def read(self) -> Coroutine[Any, Any, object]: ...

    def cancel(self) -> bool: ...


def end_of_call(status: bytes) -> object:
    """gRPC's end mark, or the error that a google.rpc.Status tells of."""
    if not status:
        return END
    told = Status.FromString(status)
    raise rpc_error(_CODES.get(told.code, grpc.StatusCode.UNKNOWN), told.message, status)


def rpc_error(code: grpc.StatusCode, message: str, status: bytes = b"") -> grpc.aio.AioRpcError:
    trailers = grpc.aio.Metadata(("grpc-status-details-bin", status)) if status else grpc.aio.Metadata()
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailers, message, None)


def is_unimplemented(failure: BaseException) -> bool:
    return isinstance(failure, grpc.aio.AioRpcError) and failure.code() is grpc.StatusCode.UNIMPLEMENTED
