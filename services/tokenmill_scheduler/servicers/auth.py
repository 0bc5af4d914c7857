"""Who calls, what they may call, and whose requests they may know of.

One interceptor looks at the bearer token of every call of tokenmill's own services; health and reflection stay open to probes. It
stands inside `ErrorInterceptor`, which tells callers of refusals. Must not know: where tokens are kept.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any, NoReturn

import grpc
from tokenmill.inference.v1.inference_pb2 import RequestSpec

from tokenmill_scheduler.access import ANONYMOUS, Access, Identity, Role
from tokenmill_scheduler.desk.errors import DeskError, UnknownRequest
from tokenmill_scheduler.desk.records import RequestStatus

_ROLES: dict[str, frozenset[Role]] = {
    "tokenmill.inference.v1.InferenceService": frozenset({Role.CLIENT, Role.OPERATOR}),
    "tokenmill.admin.v1.AdminService": frozenset({Role.OPERATOR}),
}
_SCHEME = "bearer"

# A stream of many calls can outlive its token, so there each call asks anew.
_current: ContextVar[Callable[[], Identity]] = ContextVar("identity", default=lambda: ANONYMOUS)


class Unauthenticated(DeskError):
    """The call has no token, or one that nobody has (UNAUTHENTICATED)."""


class PermissionDenied(DeskError):
    """The caller is known and may not do this (PERMISSION_DENIED)."""


def current_identity() -> Identity:
    """Of the call being answered; ANONYMOUS where no tokens are asked for.

    Raises Unauthenticated and PermissionDenied in a stream whose token is not good any more.
    """
    return _current.get()()


def claim(spec: RequestSpec) -> None:
    """Makes the request its caller's tenant's, as if it said so itself. Raises PermissionDenied when it names another tenant.

    That makes the tenant a part of the payload: two tenants' requests of one id are never equal, so neither joins the other's.
    """
    tenant = current_identity().tenant
    if tenant and spec.tenant not in ("", tenant):
        raise PermissionDenied(f"this token is for tenant {tenant}; leave request.tenant empty, or use a token of the other tenant")
    spec.tenant = tenant or spec.tenant


def check_visible(status: RequestStatus) -> None:
    """Raises UnknownRequest for another tenant's request, as if there were none: that there is one is nobody else's business."""
    request, tenant = status.stored.request, current_identity().tenant
    if tenant and request.tenant != tenant:
        raise UnknownRequest(f"there is no request {request.request_id}")


class AuthInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs alone
    def __init__(self, access: Access) -> None:
        self._access = access

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        handler: Any = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or not method.startswith("/tokenmill."):
            return handler  # type: ignore[no-any-return]
        identify = partial(self._permitted, handler_call_details.invocation_metadata, method)
        try:
            identity = identify()
        except DeskError as refusal:
            return _refusing(handler, refusal)
        return _acting_as(handler, identify if handler.stream_stream else lambda: identity)

    def _permitted(self, metadata: Sequence[tuple[str, str | bytes]], method: str) -> Identity:
        """Raises Unauthenticated, PermissionDenied."""
        identity = self._identify(metadata)
        _check_role(identity, method)
        return identity

    def _identify(self, metadata: Sequence[tuple[str, str | bytes]]) -> Identity:
        if not self._access.needs_token:
            return ANONYMOUS
        values = [value for key, value in metadata if key == "authorization"]
        if not values:
            raise Unauthenticated("this service needs a token: send it as metadata 'authorization: Bearer TOKEN'")
        scheme, _, token = str(values[0]).partition(" ")
        identity = self._access.identify(token.strip())
        if len(values) > 1 or scheme.lower() != _SCHEME or identity is None:
            raise Unauthenticated("the token is not a valid one: ask this service's operator for one")
        return identity


def _check_role(identity: Identity, method: str) -> None:
    service = method[1:].rpartition("/")[0]
    if identity.role not in _ROLES.get(service, frozenset()):
        raise PermissionDenied(f"{identity.actor} is a {identity.role}; {service} needs the role operator")


def _acting_as(handler: Any, identify: Callable[[], Identity]) -> grpc.RpcMethodHandler[Any, Any]:
    def as_identity(behaviour: Callable[..., Any]) -> Callable[..., Any]:
        def call(request: Any, context: Any) -> Any:
            # Each call is a task of its own, with a context of its own.
            _current.set(identify)
            return behaviour(request, context)

        return call

    return _rewrapped(handler, as_identity, handler.request_deserializer)


def _refusing(handler: Any, refusal: DeskError) -> grpc.RpcMethodHandler[Any, Any]:
    """Of the same arity, as gRPC demands. What a stranger sends is not even parsed."""

    def refuse(request: Any, context: Any) -> NoReturn:
        raise refusal

    return _rewrapped(handler, lambda _: refuse, None)


def _rewrapped(
    handler: Any, wrap: Callable[[Callable[..., Any]], Callable[..., Any]], request_deserializer: Callable[[bytes], Any] | None
) -> grpc.RpcMethodHandler[Any, Any]:
    codecs = {"request_deserializer": request_deserializer, "response_serializer": handler.response_serializer}
    if handler.unary_unary:
        return grpc.unary_unary_rpc_method_handler(wrap(handler.unary_unary), **codecs)
    if handler.unary_stream:
        return grpc.unary_stream_rpc_method_handler(wrap(handler.unary_stream), **codecs)
    if handler.stream_stream:
        return grpc.stream_stream_rpc_method_handler(wrap(handler.stream_stream), **codecs)
    raise NotImplementedError("tokenmill's services have no streams of requests that are answered once")
