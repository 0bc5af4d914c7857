"""The interceptor and what it gives servicers, over a fake desk; what holds over real connections is in tests/integration."""

from __future__ import annotations

import asyncio
import hashlib
import io
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest
import structlog
from tokenmill.admin.v1 import admin_pb2
from tokenmill.admin.v1.admin_pb2_grpc import AdminServiceStub, add_AdminServiceServicer_to_server
from tokenmill.inference.v1 import inference_pb2 as pb
from tokenmill.inference.v1.inference_pb2_grpc import InferenceServiceStub, add_InferenceServiceServicer_to_server
from tokenmill_scheduler.access import ANONYMOUS, Access, Identity, Role
from tokenmill_scheduler.core.request import Request
from tokenmill_scheduler.desk.records import Cancellation, Submitted
from tokenmill_scheduler.intake import Intake
from tokenmill_scheduler.servicers.admin import AdminServicer
from tokenmill_scheduler.servicers.auth import AuthInterceptor, current_identity
from tokenmill_scheduler.servicers.errors import ErrorInterceptor
from tokenmill_scheduler.servicers.inference import InferenceServicer
from tokenmill_scheduler.tenants import TenantLimits
from tokenmill_service.logs import configure_logs

from tests.fakes.desk import FakeDesk
from tests.fakes.operators import FakeOperators
from tests.unit.servicers.calls import events, refusal, spec
from tests.unit.servicers.conftest import served_model

TOKENS = {"ann": "tm-ann", "olga": "tm-olga"}
IDENTITIES = {"ann": Identity("ann", Role.CLIENT, "apple"), "olga": Identity("olga", Role.OPERATOR)}


def bearer(name: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {TOKENS[name]}"),)


class WatchfulDesk(FakeDesk):
    """Notes for whom it acts, also from tasks that calls start."""

    def __init__(self) -> None:
        super().__init__(served_model())
        self.acted_for: list[Identity] = []
        self.fails = False

    async def submit(self, request: Request, payload_digest: bytes) -> Submitted:
        held_by_a_frame = TOKENS["ann"]
        if self.fails and held_by_a_frame:
            raise RuntimeError("unforeseen")
        self.acted_for.append(await asyncio.create_task(_identity()))
        return await super().submit(request, payload_digest)

    async def cancel(self, request_id: str, reason: str, actor: str = "") -> Cancellation:
        self.acted_for.append(await asyncio.create_task(_identity()))
        return await super().cancel(request_id, reason, actor)


async def _identity() -> Identity:
    return current_identity()


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "tokens.toml"
    entries = {"ann": 'role = "client"\ntenant = "apple"', "olga": 'role = "operator"'}
    path.write_text(
        "".join(
            f'[[token]]\nname = "{name}"\nsha256 = "{hashlib.sha256(TOKENS[name].encode()).hexdigest()}"\n{rights}\n'
            for name, rights in entries.items()
        )
    )
    return path


@pytest.fixture
def desk() -> WatchfulDesk:
    return WatchfulDesk()


async def serve(desk: FakeDesk, access: Access, folder: Path) -> AsyncIterator[grpc.aio.Channel]:
    server = grpc.aio.server(interceptors=[ErrorInterceptor(), AuthInterceptor(access)])
    add_InferenceServiceServicer_to_server(InferenceServicer(desk, Intake(desk)), server)
    add_AdminServiceServicer_to_server(AdminServicer(desk, FakeOperators()), server)
    server.add_insecure_port(f"unix:{folder}/s")
    await server.start()
    async with grpc.aio.insecure_channel(f"unix:{folder}/s") as channel:
        yield channel
    await server.stop(None)


@pytest.fixture
async def channel(desk: WatchfulDesk, token_file: Path, tmp_path: Path) -> AsyncIterator[grpc.aio.Channel]:
    async for channel in serve(desk, Access(token_file, TenantLimits()), tmp_path):
        yield channel


async def test_servicers_and_their_tasks_know_who_calls(desk: WatchfulDesk, channel: grpc.aio.Channel) -> None:
    inference, admin = InferenceServiceStub(channel), AdminServiceStub(channel)
    call = inference.Generate(pb.GenerateRequest(request=spec(request_id="a")), metadata=bearer("ann"))
    await call.read()
    await asyncio.gather(
        *[
            inference.Submit(pb.SubmitRequest(request=spec(request_id=f"{n}{i}")), metadata=bearer(n))
            for i in range(5)
            for n in TOKENS
        ]
    )
    await admin.CancelRequests(admin_pb2.CancelRequestsRequest(request_ids=["a"]), metadata=bearer("olga"))
    await events(call)
    assert desk.acted_for[0] == IDENTITIES["ann"]
    assert sorted(map(str, desk.acted_for[1:-1])) == sorted(str(IDENTITIES[name]) for name in TOKENS for _ in range(5))
    assert desk.acted_for[-1] == IDENTITIES["olga"]
    assert {entry.request.tenant for name, entry in desk.entries.items() if name.startswith("ann")} == {"apple"}
    assert current_identity() is ANONYMOUS


async def test_without_tokens_everyone_is_anonymous(desk: WatchfulDesk, tmp_path: Path) -> None:
    async for channel in serve(desk, Access(None, TenantLimits()), tmp_path):
        inference = InferenceServiceStub(channel)
        await inference.Submit(pb.SubmitRequest(request=spec(request_id="a", tenant="said")), metadata=bearer("ann"))
        assert desk.acted_for == [ANONYMOUS]
        assert desk.entries["a"].request.tenant == "said"


async def test_what_a_stranger_sends_is_not_parsed(channel: grpc.aio.Channel) -> None:
    submit = channel.unary_unary("/tokenmill.inference.v1.InferenceService/Submit", None, None)
    error = await refusal(submit(b"\xff not a message"))
    assert error.code() is grpc.StatusCode.UNAUTHENTICATED
    assert error.details() == "this service needs a token: send it as metadata 'authorization: Bearer TOKEN'"


@pytest.fixture(params=["console", "json"])
def log(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """All that the service logs."""
    written = io.StringIO()
    monkeypatch.setattr("sys.stderr", written)
    configure_logs(request.param, "debug")
    yield written
    structlog.reset_defaults()


async def test_no_token_is_in_the_log_of_a_failure(desk: WatchfulDesk, channel: grpc.aio.Channel, log: io.StringIO) -> None:
    desk.fails = True
    inference = InferenceServiceStub(channel)
    error = await refusal(inference.Submit(pb.SubmitRequest(request=spec()), metadata=bearer("ann")))
    assert error.code() is grpc.StatusCode.INTERNAL
    assert "unforeseen" in log.getvalue()
    assert TOKENS["ann"] not in log.getvalue() + str(error)
