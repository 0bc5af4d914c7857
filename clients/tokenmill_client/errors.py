"""Every way a call can fail, and the one table that maps gRPC statuses to them.

`TokenmillError` is the base of all. A request that ended other than DONE raises a `RequestEnded…` error that carries its output
so far.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from tokenmill_client.records import Finished, Output, RequestState


class TokenmillError(Exception):
    """Base of all. `code` is the gRPC status name, such as "NOT_FOUND"; empty when the client itself found the fault."""

    def __init__(self, message: str, *, code: str = "", details: ErrorDetails | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        details = details or ErrorDetails()
        self.violations = details.violations
        self.retry_delay_s = details.retry_delay_s


@dataclass(frozen=True, slots=True)
class ErrorDetails:
    """From `google.rpc.BadRequest` and `google.rpc.RetryInfo`. `violations` has (field, description) pairs."""

    violations: tuple[tuple[str, str], ...] = ()
    retry_delay_s: float | None = None


class InvalidRequest(TokenmillError):
    """The request is not valid; `violations` has (field, description) pairs."""


class NotFound(TokenmillError):
    """No such request or model."""


class AlreadyExists(TokenmillError):
    """This request id belongs to a request with another payload."""


class AlreadyEnded(TokenmillError):
    """The request has ended in a way that the change asked for does not fit, or, to be tried again, has not failed."""


class ResourceExhausted(TokenmillError):
    """A limit of the server is reached, such as that on a message's size."""


class QueueFull(ResourceExhausted):
    """There is no room for it now, in the queue or for its tenant or lane; try again after `retry_delay_s`."""


class Unavailable(TokenmillError):
    """Nothing answers at the address, or the server cannot accept now. Safe to try again."""


class NoSecureConnection(Unavailable):
    """The server and this client do not agree on TLS, or do not trust each other's certificates."""


class StreamLost(Unavailable):
    """Nobody answered for so long that a stream was given up; its request goes on if it is detached.

    `client.attach(error.request_id, error.next_index)` takes it up later. `next_index` is that of the first token that has not
    come; of several choices the lowest.
    """

    def __init__(self, message: str, request_id: str, next_index: int, *, code: str = "") -> None:
        super().__init__(message, code=code)
        self.request_id = request_id
        self.next_index = next_index


class Unauthenticated(TokenmillError):
    """The server wants a token, or does not know the one given."""


class PermissionDenied(TokenmillError):
    """The token is known, and does not allow this."""


class DeadlineExceeded(TokenmillError):
    """The call took longer than its timeout. What it asked for may have happened."""


class ServerError(TokenmillError):
    """The server failed, or answered what this client does not know."""


class BrokenStream(TokenmillError):
    """The server broke the rule of streams: each index once, in order. The client will not pass such a stream on."""


class RequestNotDone(TokenmillError):
    """The request ended other than DONE; `output` is what the stream had brought."""

    def __init__(self, message: str, output: Output, *, code: str = "") -> None:
        super().__init__(message, code=code)
        self.output = output


class RequestFailed(RequestNotDone):
    """It could not be carried out."""


class RequestCancelled(RequestNotDone):
    """Its client or an operator cancelled it."""


class RequestExpired(RequestNotDone):
    """Its deadline passed."""


_BY_CODE: dict[grpc.StatusCode, type[TokenmillError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.OUT_OF_RANGE: InvalidRequest,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.ALREADY_EXISTS: AlreadyExists,
    grpc.StatusCode.FAILED_PRECONDITION: AlreadyEnded,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ResourceExhausted,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    # A server that stops cancels its calls. (Our own cancel is asyncio's CancelledError, never this.)
    grpc.StatusCode.CANCELLED: Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
}

_BY_STATE: dict[RequestState, type[RequestNotDone]] = {
    RequestState.FAILED: RequestFailed,
    RequestState.CANCELLED: RequestCancelled,
    RequestState.EXPIRED: RequestExpired,
}

# How gRPC words the loss of a connection that it does not report as UNAVAILABLE. The last is how a call ends that was lost just as
# something was written to it: gRPC forgets the status it had.
_CONNECTION_LOST = ("RST_STREAM", "Stream removed", "Connection reset", "Socket closed", "Internal error from Core")


def from_rpc_error(error: grpc.aio.AioRpcError) -> TokenmillError:
    """The typed error for a failed call."""
    code, message = error.code(), error.details() or error.code().name
    kind = _BY_CODE.get(code, ServerError)
    if kind is ServerError and any(words in message for words in _CONNECTION_LOST):
        kind = Unavailable
    details = _details(error)
    if kind is ResourceExhausted and details.retry_delay_s is not None:
        kind = QueueFull
    return kind(message, code=code.name, details=details)


def from_finished(finished: Finished, output: Output) -> RequestNotDone | None:
    """The typed error for a request's end; None when it is DONE."""
    kind = _BY_STATE.get(finished.state)
    if kind is None:
        return None
    message = finished.error or f"Request {output.request_id} is {finished.state}."
    return kind(message, output, code=_code_name(finished.error_code))


def _code_name(number: int) -> str:
    names = {code.value[0]: code.name for code in grpc.StatusCode}
    return names.get(number, "UNKNOWN") if number else ""


def _details(error: grpc.aio.AioRpcError) -> ErrorDetails:
    """Reads `google.rpc.Status` from the trailing metadata; unknown details are left out."""
    metadata = cast("Iterable[tuple[str, str | bytes]]", error.trailing_metadata() or ())
    for key, value in metadata:
        if key == "grpc-status-details-bin" and isinstance(value, bytes):
            try:
                return _unpack(status_pb2.Status.FromString(value))
            except DecodeError:
                break
    return ErrorDetails()


def _unpack(status: status_pb2.Status) -> ErrorDetails:
    violations: list[tuple[str, str]] = []
    retry_delay_s = None
    bad_request, retry_info = error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
    for detail in status.details:
        if detail.Unpack(bad_request):
            violations += [(violation.field, violation.description) for violation in bad_request.field_violations]
        elif detail.Unpack(retry_info):
            retry_delay_s = retry_info.retry_delay.ToTimedelta().total_seconds()
    return ErrorDetails(tuple(violations), retry_delay_s)
