"""TLS, tokens, tenants and their limits over real connections: executor, scheduler and client in this process."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from structlog.testing import capture_logs
from tokenmill.admin.v1 import admin_pb2
from tokenmill.inference.v1 import inference_pb2
from tokenmill_client import (
    AlreadyExists,
    AsyncClient,
    InvalidRequest,
    NoSecureConnection,
    NotFound,
    PermissionDenied,
    QueueFull,
    RequestState,
    ResourceExhausted,
    RetryPolicy,
    Tls,
    TokenmillError,
    Unauthenticated,
)
from tokenmill_client.security import channel_credentials
from tokenmill_executor.loading import Loader
from tokenmill_executor.server import ExecutorServer
from tokenmill_executor.settings import parse_settings as executor_settings
from tokenmill_scheduler.server import SchedulerServer
from tokenmill_scheduler.settings import parse_settings

from tests.fakes.calls import eventually, foretold
from tests.fakes.certificates import Authority, Pair
from tests.fakes.memory_ledger import MemoryLedger
from tests.fakes.processes import Processes

QUICK = RetryPolicy(first_delay_s=0.01, longest_delay_s=0.05, call_limit_s=0.2)
READY_S = 60.0
SERVICES = (inference_pb2.DESCRIPTOR, "InferenceService"), (admin_pb2.DESCRIPTOR, "AdminService")
METHODS = [method for file, name in SERVICES for method in file.services_by_name[name].methods]
TOKENS = {"ann": "tm-token-of-ann", "ben": "tm-token-of-ben", "olga": "tm-token-of-olga"}
PROMPT = [5, 6, 7]


@asynccontextmanager
async def executor(*flags: str) -> AsyncIterator[ExecutorServer]:
    fast = ("--simulated-step-ms", "1", "--simulated-prefill-token-us", "0", "--simulated-decode-token-us", "0")
    settings = executor_settings(["--model", "simulated", "--listen", "127.0.0.1:0", "--name", "x", *fast, *flags], {})
    server = ExecutorServer(settings, Loader(settings))
    await server.bind()
    await server.load()
    try:
        yield server
    finally:
        assert await server.stop(30)


@asynccontextmanager
async def scheduler(*flags: str, executor_flags: tuple[str, ...] = ()) -> AsyncIterator[SchedulerServer]:
    """With an executor of its own; maybe not yet ready."""
    async with executor(*executor_flags) as driven:
        settings = parse_settings(["--listen", "127.0.0.1:0", "--executor", driven.address, *flags], {})
        server = SchedulerServer(settings, MemoryLedger())
        await server.start()
        try:
            yield server
        finally:
            await server.stop()


async def generate(client: AsyncClient, request_id: str | None = None, max_tokens: int = 5, **options: Any) -> list[int]:
    if request_id is not None:
        options["request_id"] = request_id
    output = await client.generate(token_ids=PROMPT, max_tokens=max_tokens, seed=1, **options).result()
    return list(output.token_ids)


# ---- TLS -----------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "authority")


@pytest.fixture
def stranger(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "stranger")


def serving(pair: Pair, client_ca: Path | None = None) -> tuple[str, ...]:
    mutual = () if client_ca is None else ("--tls-client-ca", str(client_ca))
    return ("--tls-cert", str(pair.cert), "--tls-key", str(pair.key), *mutual)


def driving(ca: Path, pair: Pair | None = None) -> tuple[str, ...]:
    shown = () if pair is None else ("--executor-tls-cert", str(pair.cert), "--executor-tls-key", str(pair.key))
    return ("--executor-tls-ca", str(ca), *shown)


async def test_mutual_tls_from_client_to_executor(authority: Authority) -> None:
    served, shown = authority.issue("served"), authority.issue("shown", "a-client")
    door = serving(served, authority.ca)
    async with (
        scheduler(*door, *driving(authority.ca, shown), executor_flags=door) as server,
        AsyncClient(server.address, tls=Tls(authority.ca, shown.cert, shown.key)) as client,
    ):
        await client.wait_ready(READY_S)
        assert await generate(client) == foretold(PROMPT, 5)


async def test_a_client_that_does_not_fit_is_told_so(authority: Authority, stranger: Authority) -> None:
    """Without a certificate, with another authority's, without TLS, and one that does not trust the server."""
    served, shown, other = authority.issue("served"), authority.issue("shown"), stranger.issue("other")
    async with scheduler(*serving(served, authority.ca)) as server:
        for tls in (Tls(authority.ca), Tls(authority.ca, other.cert, other.key), None, Tls(stranger.ca, shown.cert, shown.key)):
            async with AsyncClient(server.address, retry=QUICK, tls=tls) as client:
                with pytest.raises(NoSecureConnection):
                    await client.list_models()
        async with AsyncClient(server.address, tls=Tls(authority.ca, shown.cert, shown.key)) as client:
            await client.wait_ready(READY_S)


async def test_a_certificate_for_another_name_is_not_taken(authority: Authority) -> None:
    served = authority.issue("served", "elsewhere.example")
    async with scheduler(*serving(served)) as server, AsyncClient(server.address, retry=QUICK, tls=Tls(authority.ca)) as client:
        with pytest.raises(NoSecureConnection, match="for this name"):
            await client.list_models()


@pytest.mark.parametrize("trouble", ["no certificate", "plain text", "another authority"])
async def test_a_scheduler_that_does_not_fit_drives_no_executor(trouble: str, authority: Authority, stranger: Authority) -> None:
    flags = {
        "no certificate": driving(authority.ca),
        "plain text": (),
        "another authority": driving(stranger.ca, authority.issue("shown")),
    }
    with capture_logs() as logs:
        async with scheduler(*flags[trouble], executor_flags=serving(authority.issue("served"), authority.ca)) as server:

            async def refused() -> bool:
                reasons = [entry["reason"] for entry in logs if entry["event"] == "executor not driven"]
                return any("TLS" in reason or "CERTIFICATE_VERIFY_FAILED" in reason for reason in reasons)

            await eventually(refused)
            assert not server.executors.any_connected


async def test_renewed_certificates_need_no_restart(authority: Authority, tmp_path: Path) -> None:
    served = authority.issue("served")
    async with scheduler(*serving(served)) as server:
        renewed = Authority(tmp_path / "renewed")
        pair = renewed.issue("served")
        # Half of it: what fitted last is served on.
        served.cert.write_bytes(pair.cert.read_bytes())
        async with AsyncClient(server.address, tls=Tls(authority.ca)) as client:
            await client.list_models()
        served.key.write_bytes(pair.key.read_bytes())
        async with AsyncClient(server.address, tls=Tls(renewed.ca)) as client:
            await client.list_models()


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "127.0.0.1:0"])
async def test_an_open_door_is_warned_of(listen: str, authority: Authority, token_file: Path) -> None:
    with capture_logs() as logs:
        async with scheduler("--listen", listen, executor_flags=("--listen", "127.0.0.1:0")):
            pass
        warnings = [entry["event"] for entry in logs if entry["log_level"] == "warning"]
        assert [words for event in warnings for words in ("plain text", "may use and operate") if words in event] == (
            ["plain text", "may use and operate"] if listen == "0.0.0.0:0" else []
        )
        logs.clear()
        async with scheduler("--listen", listen, *serving(authority.issue("served")), "--auth-tokens", str(token_file)):
            pass
        assert [entry for entry in logs if entry["log_level"] == "warning" and "address" in entry["event"]] == []


# ---- tokens --------------------------------------------------------------------------------------------------------------------


def digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def write_tokens(path: Path, tail: str = "") -> None:
    entries = [
        f'[[token]]\nname = "{name}"\nsha256 = "{digest(TOKENS[name])}"\n{rights}\n'
        for name, rights in {
            "ann": 'role = "client"\ntenant = "apple"',
            "ben": 'role = "client"\ntenant = "banana"',
            "olga": 'role = "operator"',
        }.items()
    ]
    write(path, "\n".join(entries) + tail)


def write(path: Path, text: str) -> None:
    path.write_text(text)


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "tokens.toml"
    write_tokens(path)
    return path


class People:
    """A client for each name in TOKENS, of a scheduler that is ready."""

    def __init__(self, server: SchedulerServer) -> None:
        self.server = server
        self.ann, self.ben, self.olga = (AsyncClient(server.address, retry=QUICK, token=token) for token in TOKENS.values())

    async def close(self) -> None:
        for client in (self.ann, self.ben, self.olga):
            await client.close()


@asynccontextmanager
async def people(token_file: Path, *flags: str) -> AsyncIterator[People]:
    async with scheduler("--auth-tokens", str(token_file), *flags) as server:
        persons = People(server)
        await persons.ann.wait_ready(READY_S)
        try:
            yield persons
        finally:
            await persons.close()


async def code_of(address: str, method: Any, *metadata: tuple[str, str]) -> grpc.StatusCode:
    """What a call with an empty message ends in."""
    async with grpc.aio.insecure_channel(address) as channel:
        path = f"/{method.containing_service.full_name}/{method.name}"
        try:
            if method.server_streaming:
                await channel.unary_stream(path, None, None)(b"", metadata=metadata).read()
            else:
                await channel.unary_unary(path, None, None)(b"", metadata=metadata)
        except grpc.aio.AioRpcError as error:
            return error.code()
    return grpc.StatusCode.OK


async def test_no_method_answers_without_a_valid_token(token_file: Path) -> None:
    header = "authorization"
    right = (header, f"Bearer {TOKENS['olga']}")
    wrong: list[tuple[tuple[str, str], ...]] = [
        (),
        ((header, "Bearer tm-guessed"),),
        ((header, TOKENS["olga"]),),
        ((header, f"Basic {TOKENS['olga']}"),),
        ((header, "Bearer"),),
        (right, right),
    ]
    async with people(token_file) as persons:
        for method in METHODS:
            for metadata in wrong:
                assert await code_of(persons.server.address, method, *metadata) is grpc.StatusCode.UNAUTHENTICATED, method.name
            assert await code_of(persons.server.address, method, right) is not grpc.StatusCode.UNAUTHENTICATED, method.name


async def test_clients_may_not_operate(token_file: Path) -> None:
    async with people(token_file) as persons:
        for method in METHODS:
            code = await code_of(persons.server.address, method, ("authorization", f"bearer {TOKENS['ann']}"))
            operates = method.containing_service.name == "AdminService"
            assert (code is grpc.StatusCode.PERMISSION_DENIED) == operates, method.name
        with pytest.raises(PermissionDenied, match="needs the role operator"):
            await persons.ann.admin.get_load()
        assert (await persons.olga.admin.get_load()).steps == 0


async def test_probes_need_no_token(token_file: Path) -> None:
    async with people(token_file) as persons, grpc.aio.insecure_channel(persons.server.address) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_tokens_are_read_again_when_the_file_changes(token_file: Path) -> None:
    async with people(token_file) as persons:
        access, address = persons.server.access, persons.server.address
        write_tokens(token_file, f'\n[[token]]\nname = "new"\nrole = "operator"\nsha256 = "{digest("tm-new")}"\n')
        access.refresh()
        async with AsyncClient(address, token="tm-new") as client:
            await client.admin.get_load()
            write(token_file, "[[token]]\nname =")
            with capture_logs() as logs:
                access.refresh()
            assert [(entry["log_level"], entry["event"]) for entry in logs] == [
                ("error", "the tokens in force are those of before")
            ]
            await client.admin.get_load()
            write(token_file, "")
            access.refresh()
            with pytest.raises(Unauthenticated):
                await client.admin.get_load()


# ---- tenants -------------------------------------------------------------------------------------------------------------------


async def test_a_tenant_meets_only_its_own_requests(token_file: Path) -> None:
    by_id = {method.name for method in METHODS if "request_id" in method.input_type.fields_by_name}
    assert by_id >= {"Attach", "GetRequest", "Cancel"}
    assert {m.name for m in METHODS if m.name in by_id and m.containing_service.name == "InferenceService"} == {
        "Attach",
        "GetRequest",
        "Cancel",
    }, "another call names a request: see that it does not tell of another tenant's, and test it here"
    async with people(token_file, "--max-num-seqs", "2") as persons:
        ann, ben, olga = persons.ann, persons.ben, persons.olga
        await ann.submit(token_ids=PROMPT, max_tokens=3_000, seed=1, n=2, request_id="live")
        await ann.submit(token_ids=PROMPT, max_tokens=5, seed=1, request_id="waits")
        for request_id in ("live", "live/1", "waits", "nobody-s", "nobody-s/1"):
            asks: list[Callable[[], Any]] = [
                lambda request_id=request_id: ben.get_request(request_id),  # type: ignore[misc]
                lambda request_id=request_id: ben.cancel(request_id),  # type: ignore[misc]
                lambda request_id=request_id: ben.attach(request_id).result(),  # type: ignore[misc]
                lambda request_id=request_id: ben.attach(request_id, output="token_ids").result(),  # type: ignore[misc]
            ]
            for ask in asks:
                with pytest.raises(NotFound, match=f"^there is no request {request_id}$"):
                    await ask()
        assert (await ann.get_request("live")).info.state in (RequestState.PREFILL, RequestState.DECODE)
        assert (await olga.get_request("live")).info.tenant == "apple"
        await olga.cancel("live")
        assert list((await ann.attach("waits").result()).token_ids) == foretold(PROMPT, 5)
        # Ended, from the ledger.
        with pytest.raises(NotFound):
            await ben.get_request("waits", include_output=True)


async def test_an_id_of_another_tenant_is_neither_joined_nor_told_of(token_file: Path) -> None:
    async with people(token_file) as persons:
        await generate(persons.ann, "same")
        assert await generate(persons.ann, "same") == foretold(PROMPT, 5)
        for again in (
            lambda: generate(persons.ben, "same"),
            lambda: persons.ben.submit(token_ids=PROMPT, max_tokens=5, seed=1, request_id="same"),
        ):
            with pytest.raises(AlreadyExists) as refused:
                await again()
            assert "apple" not in str(refused.value)


async def test_the_tenant_is_the_tokens(token_file: Path) -> None:
    async with people(token_file) as persons:
        await generate(persons.ann, "silent")
        await generate(persons.ann, "named", tenant="apple")
        with pytest.raises(PermissionDenied, match="this token is for tenant apple"):
            await generate(persons.ann, "posing", tenant="banana")
        await generate(persons.olga, "for-ben", tenant="banana")
        tenants = {info.request_id: info.tenant async for info in persons.olga.admin.list_requests()}
        assert tenants == {"silent": "apple", "named": "apple", "for-ben": "banana"}
        assert (await persons.ben.get_request("for-ben")).info.state is RequestState.DONE


async def test_limits_hold_for_each_tenant_alone(token_file: Path) -> None:
    write_tokens(token_file, "\n[tenant.banana]\nmax_requests = 3\n")
    flags = ("--max-num-seqs", "1", "--max-tenant-requests", "2", "--max-tenant-queued-tokens", "4000")
    async with people(token_file, *flags) as persons:

        async def submit(client: AsyncClient, request_id: str, max_tokens: int) -> None:
            await client.submit(token_ids=PROMPT, max_tokens=max_tokens, seed=1, request_id=request_id)

        await submit(persons.ann, "a1", 3_000)
        await submit(persons.ann, "a2", 10)
        with pytest.raises(QueueFull, match="tenant apple has 2 requests") as refused:
            await submit(persons.ann, "a3", 10)
        assert refused.value.retry_delay_s
        # The same request once more is no further one.
        await submit(persons.ann, "a2", 10)
        await submit(persons.ben, "b1", 3_000)
        with pytest.raises(QueueFull, match="may have 4000; the request may come to 1003"):
            await submit(persons.ben, "b2", 1_000)
        with pytest.raises(ResourceExhausted, match="ask for a lower max_tokens") as hopeless:
            await submit(persons.ben, "b2", 3_998)
        assert not isinstance(hopeless.value, QueueFull)
        await submit(persons.ben, "b2", 10)
        await submit(persons.ben, "b3", 10)
        with pytest.raises(QueueFull, match="tenant banana has 3 requests"):
            await submit(persons.ben, "b4", 10)
        known = sorted([info.request_id async for info in persons.olga.admin.list_requests()])
        assert known == ["a1", "a2", "b1", "b2", "b3"]
        await persons.ann.cancel("a1")
        await submit(persons.ann, "a3", 10)


async def test_a_prompt_over_the_services_own_limit(token_file: Path) -> None:
    async with people(token_file, "--max-prompt-tokens", "3") as persons:
        await generate(persons.ann)
        with pytest.raises(InvalidRequest, match="has 4 tokens; this service takes 3"):
            await persons.ann.generate(token_ids=[1, 2, 3, 4], max_tokens=1).result()


# ---- secrets -------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def processes() -> Iterator[Processes]:
    with Processes() as running:
        yield running


@pytest.mark.parametrize("log_format", ["console", "json"])
async def test_tokens_are_in_no_log_and_no_error(log_format: str, processes: Processes, token_file: Path) -> None:
    flags = ("--auth-tokens", str(token_file), "--log-level", "debug", "--log-format", log_format)
    server = processes.scheduler(processes.executor().address, flags=flags)
    secrets = [*TOKENS.values(), "tm-guessed"]
    words = []
    for token in secrets:
        async with AsyncClient(server.address, retry=QUICK, token=token) as client:
            await client.wait_ready(READY_S)
            for call in (client.list_models(), client.admin.get_load(), client.get_request("none"), generate(client, tenant="x")):
                try:
                    await call
                except TokenmillError as error:
                    words += [str(error), repr(error), repr(error.__cause__)]
            words += [repr(client), repr(vars(client)["_transport"])]
    assert server.stop() == 0
    words.append(server.log.read_text())
    assert "request done" in words[-1]
    assert [secret for secret in secrets for said in words if secret in said] == []


def test_a_token_that_cannot_be_sent_is_refused_without_its_words() -> None:
    for token in ("", "tm secret", "tm-sécret", "tm-secret\n"):
        with pytest.raises(ValueError, match="printable ASCII") as refused:
            AsyncClient(token=token)
        assert "cret" not in str(refused.value)


def test_files_for_tls_that_are_of_no_use(authority: Authority, stranger: Authority, tmp_path: Path) -> None:
    pair, other = authority.issue("a"), stranger.issue("b")
    with pytest.raises(FileNotFoundError):
        channel_credentials(Tls(tmp_path / "none.pem"))
    with pytest.raises(ValueError, match="give both, or neither"):
        channel_credentials(Tls(authority.ca, cert=pair.cert))
    for tls in (Tls(pair.key), Tls(authority.ca, pair.cert, other.key), Tls(authority.ca, pair.key, pair.cert)):
        with pytest.raises(ValueError, match="not PEM, or the certificate and its key do not fit"):
            channel_credentials(tls)
