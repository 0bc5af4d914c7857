"""What goes around every call: its request is decoded, its stream is driven and closed, and what it raises becomes a status.

Must not know: which status (`statuses`), what calls do.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, NoReturn, Protocol

import grpc
from google.protobuf.message import DecodeError, Message
from grpc_status import rpc_status

from tokenmill_scheduler.intake import InvalidArgument
from tokenmill_scheduler.servicers.sizes import MessageTooLarge, check_size
from tokenmill_scheduler.servicers.statuses import reason_of, told_of

_SUBMITS = frozenset(f"/tokenmill.inference.v1.InferenceService/{method}" for method in ("Generate", "Submit"))

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
