"""Exceptions → statuses, and what must never leave the house."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import structlog
from google.rpc import error_details_pb2
from tokenmill.admin.v1 import admin_pb2 as admin
from tokenmill.inference.v1 import inference_pb2 as pb
from tokenmill_scheduler.core.request import Request
from tokenmill_scheduler.desk import errors
from tokenmill_scheduler.desk.records import Submitted
from tokenmill_scheduler.ledger.errors import LedgerUnavailable
from tokenmill_scheduler.servicers.errors import ErrorInterceptor
from tokenmill_scheduler.servicers.statuses import status_of

from tests.unit.servicers.calls import detail, details, events, refusal, spec, violations
from tests.unit.servicers.conftest import Served


def test_every_error_of_the_desk_has_a_status_and_a_reason_of_its_own() -> None:
    kinds = [
        kind
        for _, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, errors.DeskError) and kind not in (errors.DeskError, errors.Refused)
    ]
    assert len(kinds) == 11
    reasons = set()
    for kind in kinds:
        refused = issubclass(kind, errors.Refused)
        arguments = ("words", 1.0, "max_queue_len") if refused else ("words", 1.0) if kind is errors.Unavailable else ("words",)
        status = status_of(kind(*arguments))
        assert status is not None
        assert status.message == "words"
        info = error_details_pb2.ErrorInfo()
        status.details[0].Unpack(info)
        assert dict(info.metadata) == ({"limit": "max_queue_len"} if refused else {})
        reasons.add(info.reason)
    assert len(reasons) == len(kinds)


def test_a_database_that_is_away_is_unavailable_in_our_words() -> None:
    status = status_of(LedgerUnavailable("password=hunter2"))
    assert status is not None
    assert status.code == grpc.StatusCode.UNAVAILABLE.value[0]
    assert "hunter2" not in status.message


@pytest.mark.parametrize("method", ["Submit", "Generate"])
async def test_what_is_no_message_of_the_protocol_is_the_callers_fault(served: Served, method: str) -> None:
    path = f"/tokenmill.inference.v1.InferenceService/{method}"
    channel: Any = served.channel  # the stubs want codecs; without them bytes go as they are
    call = (channel.unary_unary if method == "Submit" else channel.unary_stream)(path)(b"\x0a\xff")
    error = await refusal(call if method == "Submit" else call.read())
    assert violations(error) == {"message": "it cannot be decoded as the protocol has it"}
    assert detail(error, error_details_pb2.ErrorInfo).reason == "INVALID_ARGUMENT"


@pytest.mark.parametrize("streamed", [False, True])
async def test_the_unforeseen_is_internal_with_an_id_and_never_in_its_own_words(served: Served, streamed: bool) -> None:
    def oracle(request: Request, index: int) -> int:
        raise AssertionError

    async def broken(request: Request, payload_digest: bytes) -> Submitted:
        raise RuntimeError("secret of the house")

    served.desk.submit = broken  # type: ignore[method-assign]
    with structlog.testing.capture_logs() as logs:
        if streamed:
            error = await refusal(served.inference.Generate(pb.GenerateRequest(request=spec())).read())
        else:
            error = await refusal(served.inference.Submit(pb.SubmitRequest(request=spec())))
    assert error.code() is grpc.StatusCode.INTERNAL
    assert b"secret" not in details(error).SerializeToString()
    assert "secret" not in (error.details() or "")
    error_id = detail(error, error_details_pb2.ErrorInfo).metadata["error_id"]
    assert error_id in (error.details() or "")
    (entry,) = logs
    assert entry["error_id"] == error_id
    assert str(entry["exc_info"]) == "secret of the house"


class GoneClient:
    """The context of a call whose client has gone: what is written raises what grpc.aio raises then."""

    async def write(self, message: object) -> None:
        raise grpc.aio.InternalError

    async def abort_with_status(self, status: object) -> None:
        raise AssertionError("there is nobody to tell")


async def test_a_stream_is_closed_before_the_call_ends_when_its_client_has_gone() -> None:
    closed = []

    async def stream(request: object, context: object) -> AsyncIterator[str]:
        try:
            yield "a"
            yield "b"
        finally:
            await asyncio.sleep(0)
            closed.append(True)

    async def continuation(details: object) -> grpc.RpcMethodHandler[Any, Any]:
        return grpc.unary_stream_rpc_method_handler(stream)

    call = SimpleNamespace(method="/tokenmill.inference.v1.InferenceService/Generate")
    handler: Any = await ErrorInterceptor().intercept_service(continuation, call)  # type: ignore[arg-type]
    await handler.unary_stream(object(), GoneClient())
    assert closed == [True]


async def test_health_and_reflection_pass_untouched() -> None:
    handler = grpc.unary_unary_rpc_method_handler(lambda request, context: request)

    async def continuation(details: object) -> grpc.RpcMethodHandler[Any, Any]:
        return handler

    call = SimpleNamespace(method="/grpc.health.v1.Health/Check")
    assert await ErrorInterceptor().intercept_service(continuation, call) is handler  # type: ignore[arg-type]


async def test_what_a_client_sent_comes_back_shortened(served: Served) -> None:
    """Metadata has a limit; an answer that breaks it would not arrive at all."""
    error = await refusal(served.inference.Submit(pb.SubmitRequest(request=spec(model="é" * 100_000))))
    assert error.code() is grpc.StatusCode.NOT_FOUND
    assert detail(error, error_details_pb2.ErrorInfo).reason == "UNKNOWN_MODEL"


@pytest.mark.parametrize("request_id", ["", "a\0b", "x" * 129, "é"])
async def test_what_no_request_can_be_called_never_reaches_the_desk(served: Served, request_id: str) -> None:
    served.desk.entries[request_id] = served.desk.entries.get("nobody")  # type: ignore[assignment]  # would break what reads it
    calls: list[Awaitable[object]] = [
        served.inference.Cancel(pb.CancelRequest(request_id=request_id)),
        served.inference.GetRequest(pb.GetRequestRequest(request_id=request_id)),
        served.inference.Attach(pb.AttachRequest(request_id=request_id)).read(),
        served.admin.GetRequest(admin.GetRequestRequest(request_id=request_id)),
        served.admin.UpdateRequest(admin.UpdateRequestRequest(request_id=request_id, priority=1)),
    ]
    for call in calls:
        assert list(violations(await refusal(call))) == ["request_id"]
    outcomes = (await served.admin.CancelRequests(admin.CancelRequestsRequest(request_ids=[request_id]))).outcomes
    assert [outcome.not_found for outcome in outcomes] == [True]


async def test_c55_a_refused_request_leaves_the_others_alone(served: Served) -> None:
    good = served.inference.Generate(pb.GenerateRequest(request=spec(request_id="a")))
    await good.read()
    bad = await refusal(served.inference.Generate(pb.GenerateRequest(request=spec(prompt=[]))).read())
    assert bad.code() is grpc.StatusCode.INVALID_ARGUMENT
    served.desk.produce("a", 8)
    assert (await events(good))[-1].finished.usage.output_tokens == 8
