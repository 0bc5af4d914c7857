"""One place that turns what was raised into a gRPC status with rich details, and that drives and closes every stream.

Every status has an ErrorInfo whose reason a client can tell apart; RetryInfo says when to come again, BadRequest which fields are
at fault. What we did not foresee is INTERNAL with an id to find it in the log by; its own words stay here.
"""

from __future__ import annotations

import math
import secrets
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import aclosing
from typing import Any, NoReturn, Protocol

import grpc
import structlog
from google.protobuf.message import DecodeError, Message
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from tokenmill_scheduler.desk import errors
from tokenmill_scheduler.intake import InvalidArgument
from tokenmill_scheduler.intake.violations import Violation
from tokenmill_scheduler.ledger.errors import LeaseLost, LedgerUnavailable
from tokenmill_scheduler.servicers import auth
from tokenmill_scheduler.servicers.sizes import MessageTooLarge, check_size

DOMAIN = "tokenmill"
_LEDGER_RETRY_S = 1.0
_SUBMITS = frozenset(f"/tokenmill.inference.v1.InferenceService/{method}" for method in ("Generate", "Submit"))
# Messages name what was asked for, which can be of any length; metadata, which carries them twice, is cut off at about 8 KB.
_MAX_MESSAGE_CHARS = 500

_REASONS: dict[type[Exception], tuple[int, str]] = {
    InvalidArgument: (code_pb2.INVALID_ARGUMENT, "INVALID_ARGUMENT"),
    errors.UnknownRequest: (code_pb2.NOT_FOUND, "UNKNOWN_REQUEST"),
    errors.RequestExists: (code_pb2.ALREADY_EXISTS, "REQUEST_EXISTS"),
    errors.UnknownModel: (code_pb2.NOT_FOUND, "UNKNOWN_MODEL"),
    errors.QueueFull: (code_pb2.RESOURCE_EXHAUSTED, "QUEUE_FULL"),
    errors.TenantLimit: (code_pb2.RESOURCE_EXHAUSTED, "TENANT_LIMIT"),
    MessageTooLarge: (code_pb2.RESOURCE_EXHAUSTED, "MESSAGE_TOO_LARGE"),
    errors.Overloaded: (code_pb2.RESOURCE_EXHAUSTED, "OVERLOADED"),
    errors.Unavailable: (code_pb2.UNAVAILABLE, "UNAVAILABLE"),
    errors.IndexAhead: (code_pb2.OUT_OF_RANGE, "INDEX_AHEAD"),
    errors.RequestEnded: (code_pb2.FAILED_PRECONDITION, "REQUEST_ENDED"),
    errors.RequestNotFailed: (code_pb2.FAILED_PRECONDITION, "REQUEST_NOT_FAILED"),
    errors.UnknownExecutor: (code_pb2.NOT_FOUND, "UNKNOWN_EXECUTOR"),
    auth.Unauthenticated: (code_pb2.UNAUTHENTICATED, "UNAUTHENTICATED"),
    auth.PermissionDenied: (code_pb2.PERMISSION_DENIED, "PERMISSION_DENIED"),
}

# What a submit can be refused for.
SUBMIT_REFUSALS = (
    "INVALID_ARGUMENT", "MESSAGE_TOO_LARGE", "UNKNOWN_MODEL", "REQUEST_EXISTS", "QUEUE_FULL", "TENANT_LIMIT", "OVERLOADED",
    "UNAVAILABLE", "UNAUTHENTICATED", "PERMISSION_DENIED", "INTERNAL",
)  # fmt: skip

log = structlog.get_logger(__name__)

Failed = Callable[[Exception], None]
# A request that was not taken, in its place.
Unreadable = InvalidArgument | MessageTooLarge


class Context(Protocol):
    """What is used here of grpc.aio's context of a call."""

    async def write(self, message: Message) -> None: ...

    async def abort_with_status(self, status: grpc.Status) -> NoReturn: ...


class ErrorInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs alone
    """For tokenmill's own services; health and reflection pass untouched.

    `refused` is told the reason of each submit that fails before it is accepted. A request of more than `max_message_bytes` is
    refused; of a stream of requests it is for the servicer to see which one that is.
    """

    def __init__(self, refused: Callable[[str], None] = lambda reason: None, max_message_bytes: int = sys.maxsize) -> None:
        self._refused = refused
        self._max_message_bytes = max_message_bytes

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        handler: Any = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or not method.startswith("/tokenmill."):
            return handler  # type: ignore[no-any-return]
        decode, max_bytes = handler.request_deserializer, sys.maxsize if handler.request_streaming else self._max_message_bytes
        codecs = {
            "request_deserializer": decode and _decoding(decode, max_bytes),
            "response_serializer": handler.response_serializer,
        }
        failed = self._submit_failed if method in _SUBMITS else _ignore
        if handler.unary_unary:
            return grpc.unary_unary_rpc_method_handler(_guard_unary(handler.unary_unary, method, failed), **codecs)
        if handler.unary_stream:
            return grpc.unary_stream_rpc_method_handler(_guard_stream(handler.unary_stream, method, failed), **codecs)
        if handler.stream_stream:
            behaviour = _reading(handler.stream_stream)
            return grpc.stream_stream_rpc_method_handler(_guard_stream(behaviour, method, failed), **codecs)
        return handler  # type: ignore[no-any-return]

    def _submit_failed(self, error: Exception) -> None:
        self._refused(reason_of(error))


def _ignore(error: Exception) -> None:
    """Only submits are counted."""


def reason_of(error: Exception) -> str:
    """As in its status's ErrorInfo."""
    return _known(error)[1] or "INTERNAL"


def told_of(error: Exception, method: str) -> status_pb2.Status:
    """The status that tells a client of any `error`; one that is not foreseen is logged as of `method`."""
    return status_of(error) or _internal(error, method)


def status_of(error: Exception) -> status_pb2.Status | None:
    """The status that tells a client of `error`; None for one that is not foreseen."""
    error = _as_told(error)
    code, reason = _known(error)
    if not reason:
        return None
    status = status_pb2.Status(code=code, message=str(error)[:_MAX_MESSAGE_CHARS])
    metadata = {"limit": error.limit} if isinstance(error, errors.Refused) else {}
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN, metadata=metadata))
    if isinstance(error, InvalidArgument):
        status.details.add().Pack(_bad_request(error.violations))
    if isinstance(error, MessageTooLarge):
        status.details.add().Pack(_bad_request([Violation(error.field, error.description)]))
    if isinstance(error, errors.Refused | errors.Unavailable) and error.retry_delay_s is not None:
        status.details.add().Pack(_retry_info(error.retry_delay_s))
    return status


def _as_told(error: Exception) -> Exception:
    """What the ledger says, as the desk would say it."""
    if isinstance(error, LedgerUnavailable):
        return errors.Unavailable("the database cannot be reached", _LEDGER_RETRY_S)
    if isinstance(error, LeaseLost):
        return errors.Unavailable("another scheduler has taken over from this one", _LEDGER_RETRY_S)
    return error


def _known(error: Exception) -> tuple[int, str]:
    """Code and reason; the reason of an error that is not foreseen is empty."""
    return _REASONS.get(type(_as_told(error)), (code_pb2.INTERNAL, ""))


def _decoding(decode: Callable[[bytes], Message], max_bytes: int) -> Callable[[bytes], Message | Unreadable]:
    """What cannot be read reaches the guard as an error; gRPC would answer in the decoder's words, as if it were our fault."""

    def decoded(data: bytes) -> Message | Unreadable:
        try:
            message = decode(data)
            check_size(message, len(data), max_bytes)
        except DecodeError:
            return InvalidArgument.of("message", "it cannot be decoded as the protocol has it")
        except MessageTooLarge as error:
            return error
        return message

    return decoded


def _reading(
    behaviour: Callable[[AsyncIterator[Message], Context], AsyncIterator[Message]],
) -> Callable[[AsyncIterator[Message | Unreadable], Context], AsyncIterator[Message]]:
    """Raises what could not be read where the behaviour reads it."""

    async def checked(requests: AsyncIterator[Message | Unreadable]) -> AsyncIterator[Message]:
        async for request in requests:
            if isinstance(request, Unreadable):
                raise request
            yield request

    return lambda requests, context: behaviour(checked(requests), context)


def _guard_unary(
    behaviour: Callable[[Message, Context], Awaitable[Message]], method: str, failed: Failed
) -> Callable[[Message | Unreadable, Context], Awaitable[Message]]:
    async def guarded(request: Message | Unreadable, context: Context) -> Message:
        try:
            if isinstance(request, Unreadable):
                raise request
            return await behaviour(request, context)
        except Exception as error:
            failed(error)
            await _abort(error, method, context)

    return guarded


def _guard_stream(
    behaviour: Callable[[Any, Context], AsyncIterator[Message]], method: str, failed: Failed
) -> Callable[[Any, Context], Awaitable[None]]:
    """grpc.aio leaves a generator whose client is gone to the garbage collector; here it is closed before the call ends."""

    async def guarded(request: Any, context: Context) -> None:
        accepted = False
        try:
            if isinstance(request, Unreadable):
                raise request
            async with aclosing(behaviour(request, context)) as responses:  # type: ignore[type-var]  # they are generators
                async for response in responses:
                    accepted = True
                    if not await _write(context, response):
                        return
        except Exception as error:
            if not accepted:
                failed(error)
            await _abort(error, method, context)

    return guarded


async def _write(context: Context, response: Message) -> bool:
    """False when the client is gone, which grpc.aio tells a writer with an error of its own and not by cancelling it."""
    try:
        await context.write(response)
    except grpc.aio.InternalError:
        return False
    return True


async def _abort(error: Exception, method: str, context: Context) -> NoReturn:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    await context.abort_with_status(rpc_status.to_status(told_of(error, method)))


def _internal(error: Exception, method: str) -> status_pb2.Status:
    error_id = secrets.token_hex(4)
    log.error("RPC failed", method=method, error_id=error_id, exc_info=error)
    status = status_pb2.Status(code=code_pb2.INTERNAL, message=f"internal error {error_id}; the scheduler's log tells more")
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason="INTERNAL", domain=DOMAIN, metadata={"error_id": error_id}))
    return status


def _bad_request(violations: Iterable[Violation]) -> error_details_pb2.BadRequest:
    details = error_details_pb2.BadRequest()
    for violation in violations:
        details.field_violations.add(field=violation.field, description=violation.description)
    return details


def _retry_info(delay_s: float) -> error_details_pb2.RetryInfo:
    info = error_details_pb2.RetryInfo()
    info.retry_delay.FromMilliseconds(math.ceil(delay_s * 1000))
    return info
