"""The scheduler, in this process, over gRPC on both sides: clients here, a simulated executor as a process of its own."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator, MutableMapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from structlog.testing import capture_logs
from tokenmill.admin.v1 import admin_pb2
from tokenmill.inference.v1 import inference_pb2 as pb
from tokenmill.inference.v1 import types_pb2 as types
from tokenmill_scheduler import server as server_module
from tokenmill_scheduler.grpc_server import SERVICES
from tokenmill_scheduler.health import LIVENESS
from tokenmill_scheduler.loop import Loop
from tokenmill_scheduler.server import SchedulerServer
from tokenmill_scheduler.settings import parse_settings
from tokenmill_service.flags import SettingsError

from tests.fakes.calls import Caller, Stream, eventually, foretold, spec
from tests.fakes.memory_ledger import MemoryLedger
from tests.fakes.processes import Processes, ServiceProcess, wait_serving


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    with Processes() as running:
        yield running


@pytest.fixture(scope="module")
def executor(processes: Processes) -> ServiceProcess:
    return processes.executor()


@asynccontextmanager
async def scheduler(
    *executors: ServiceProcess, flags: tuple[str, ...] = (), ledger: MemoryLedger | None = None
) -> AsyncIterator[SchedulerServer]:
    """Ready when entered. Its executors serve the next test's scheduler afterwards."""
    addresses = [part for process in executors for part in ("--executor", process.address)]
    settings = parse_settings(["--listen", "127.0.0.1:0", *addresses, *flags], {})
    server = SchedulerServer(settings, ledger or MemoryLedger())
    await server.start()
    try:
        await wait_serving(server.address)
        yield server
    finally:
        await server.stop()


async def test_many_streams_at_once_are_exact(executor: ServiceProcess) -> None:
    rng = random.Random(7)
    prompts = [[rng.randrange(32, 127) for _ in range(rng.randrange(1, 300))] for _ in range(40)]
    lengths = [rng.randrange(1, 60) for _ in prompts]
    async with (
        scheduler(executor, flags=("--max-num-seqs", "8", "--max-num-batched-tokens", "64")) as server,
        Caller(server.address) as caller,
    ):
        runs = [
            caller.run(spec(prompt, length, seed=index))
            for index, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
        ]
        streams = await asyncio.gather(*runs)
        for index, (stream, prompt, length) in enumerate(zip(streams, prompts, lengths, strict=True)):
            assert stream.tokens == foretold(prompt, length, seed=index)
            assert stream.text == "".join(map(chr, stream.tokens))
            assert stream.finished is not None
            assert stream.finished.finish_reason == types.FINISH_REASON_LENGTH
            assert (stream.finished.usage.prompt_tokens, stream.finished.usage.output_tokens) == (len(prompt), length)
        load = await caller.admin.GetLoad(admin_pb2.GetLoadRequest())
        assert (load.num_requests_running, load.num_requests_waiting, load.kv_cache_usage) == (0, 0, 0)
        assert load.output_tokens == sum(lengths)


async def test_a_static_batch_that_is_not_full_starts_after_its_wait(executor: ServiceProcess) -> None:
    flags = ("--batching", "static", "--max-num-seqs", "8", "--max-waiting-time", "0.05")
    async with scheduler(executor, flags=flags) as server, Caller(server.address) as caller:
        streams = await asyncio.gather(*[caller.run(spec([50 + index], 10 * (index + 1))) for index in range(3)])
        assert [stream.tokens for stream in streams] == [foretold([50 + index], 10 * (index + 1)) for index in range(3)]


@pytest.mark.parametrize("before_end", [0, 1, 2])
async def test_c02_cancel_near_the_end_gives_one_end(executor: ServiceProcess, before_end: int) -> None:
    async with scheduler(executor) as server, Caller(server.address) as caller:
        for attempt in range(10):
            request_id, prompt = f"r{attempt}", [40 + attempt]
            call = caller.generate(spec(prompt, 5, request_id))
            stream = await Stream().read(call, until_tokens=5 - before_end)
            answer = await caller.inference.Cancel(pb.CancelRequest(request_id=request_id))
            await stream.read(call)
            assert stream.finished is not None
            assert stream.tokens == foretold(prompt, 5)[: len(stream.tokens)]
            life = await caller.admin.GetRequest(admin_pb2.GetRequestRequest(request_id=request_id))
            ends = [move.to_state for move in life.transitions if move.to_state >= types.REQUEST_STATE_DONE]
            assert ends == [stream.finished.state] == [life.request.state] == [answer.state]
            assert answer.already_ended == (answer.state == types.REQUEST_STATE_DONE)


async def test_c03_cancel_a_finished_request_twice(executor: ServiceProcess) -> None:
    async with scheduler(executor) as server, Caller(server.address) as caller:
        await caller.run(spec([50], 3, "done"))
        life = await caller.admin.GetRequest(admin_pb2.GetRequestRequest(request_id="done"))
        for _ in range(2):
            answer = await caller.inference.Cancel(pb.CancelRequest(request_id="done"))
            assert (answer.state, answer.already_ended) == (types.REQUEST_STATE_DONE, True)
        assert await caller.admin.GetRequest(admin_pb2.GetRequestRequest(request_id="done")) == life


async def test_c09_two_submits_with_one_id(executor: ServiceProcess) -> None:
    async with scheduler(executor) as server, Caller(server.address) as caller:
        one, other = await asyncio.gather(caller.run(spec([60], 20, "same")), caller.run(spec([60], 20, "same")))
        assert one.tokens == other.tokens == foretold([60], 20)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await caller.run(spec([61], 20, "same"))
        assert refused.value.code() is grpc.StatusCode.ALREADY_EXISTS
        load = await caller.admin.GetLoad(admin_pb2.GetLoadRequest())
        assert load.output_tokens == 20


async def test_c12_cancelling_ends_the_stream_of_another_client(executor: ServiceProcess) -> None:
    async with scheduler(executor, flags=("--max-num-seqs", "1")) as server, Caller(server.address) as caller:
        await caller.submit(spec([70], 4_000, "long"))
        waiting = caller.generate(spec([71], 5, "waits"))
        stream = await Stream().read(waiting, until_tokens=0)
        async with Caller(server.address) as another:
            await another.inference.Cancel(pb.CancelRequest(request_id="waits", reason="changed my mind"))
            await stream.read(waiting)
            await another.inference.Cancel(pb.CancelRequest(request_id="long"))
        assert stream.finished is not None
        assert stream.finished.state == types.REQUEST_STATE_CANCELLED
        assert stream.tokens == []


async def test_c13_a_dropped_stream_takes_its_request_along(executor: ServiceProcess) -> None:
    async with scheduler(executor) as server, Caller(server.address) as caller:
        call = caller.generate(spec([80], 2_048, "dropped"))
        await Stream().read(call, until_tokens=3)
        call.cancel()
        watched = await Stream().read(caller.attach("dropped"))
        assert watched.finished is not None
        assert watched.finished.state == types.REQUEST_STATE_CANCELLED
        assert watched.finished.usage.output_tokens < 2_048

        async def blocks_are_free() -> bool:
            (status,) = (await caller.admin.ListExecutors(admin_pb2.ListExecutorsRequest())).executors
            return status.held_blocks == 0 and status.running == 0

        await eventually(blocks_are_free)


async def test_c38_a_full_queue_asks_to_come_back(executor: ServiceProcess) -> None:
    async with (
        scheduler(executor, flags=("--max-num-seqs", "1", "--max-queue-len", "2")) as server,
        Caller(server.address) as caller,
    ):
        running = caller.generate(spec([90], 4_000, "runs"))
        await Stream().read(running, until_tokens=1)
        answers = await asyncio.gather(*[caller.submit(spec([91], 2, f"q{index}")) for index in range(5)], return_exceptions=True)
        refused = [answer for answer in answers if isinstance(answer, grpc.aio.AioRpcError)]
        assert [error.code() for error in refused] == [grpc.StatusCode.RESOURCE_EXHAUSTED] * 3
        assert all("RetryInfo" in str(error.trailing_metadata()) for error in refused)
        running.cancel()


async def test_c57_a_prompt_of_300_000_ids_and_a_plan_with_512_new_requests(processes: Processes) -> None:
    large = processes.executor(
        *("--max-model-len", "400000", "--num-gpu-blocks-override", "30000", "--max-num-seqs", "512"),
        *("--max-num-batched-tokens", "65536", "--name", "large"),
        name="large",
    )
    prompt = [40 + index % 80 for index in range(300_000)]
    many = [[40 + index % 80, 41 + index // 80, 42] for index in range(512)]
    async with scheduler(large, flags=("--max-num-seqs", "512", "--max-num-batched-tokens", "65536")) as server:
        async with Caller(server.address) as caller:
            assert (await caller.run(spec(prompt, 3))).tokens == foretold(prompt, 3)
            streams = await asyncio.gather(*[caller.run(spec(short, 2)) for short in many])
            assert [stream.tokens for stream in streams] == [foretold(short, 2) for short in many]


@pytest.mark.parametrize(
    ("flags", "code"),
    [((), grpc.StatusCode.INVALID_ARGUMENT), (("--max-message-bytes", "4MiB"), grpc.StatusCode.RESOURCE_EXHAUSTED)],
    ids=["default", "4MiB"],
)
async def test_c57_messages_are_taken_up_to_the_configured_limit(
    executor: ServiceProcess, flags: tuple[str, ...], code: grpc.StatusCode
) -> None:
    """What gets through the door is refused for its text."""
    async with scheduler(executor, flags=flags) as server, Caller(server.address) as caller:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await caller.inference.Tokenize(pb.TokenizeRequest(prompt=pb.Prompt(text="a" * 5_000_000)))
        assert refused.value.code() is code
        assert (await caller.run(spec([60], 3))).tokens == foretold([60], 3)


async def test_c58_c60_a_stop_string_cuts_text_and_tokens(executor: ServiceProcess) -> None:
    prompt = [100, 101]
    text = "".join(map(chr, foretold(prompt, 200)))
    stop = text[50:53]
    cut = text.index(stop)
    async with scheduler(executor) as server, Caller(server.address) as caller:
        stream = await caller.run(spec(prompt, 200, "stopped", stop=[stop]))
        assert stream.finished is not None
        assert stream.finished.finish_reason == types.FINISH_REASON_STOP
        assert stream.text == text[:cut]
        assert stream.tokens == foretold(prompt, 200)[: cut + 3]
        stored = await caller.inference.GetRequest(pb.GetRequestRequest(request_id="stopped", include_output=True))
        assert list(stored.output_token_ids) == stream.tokens
        assert stored.request.usage.output_tokens == cut + 3
        again = await Stream(next_index=cut).read(caller.attach("stopped", cut))
        assert again.tokens == stream.tokens[cut:]
        # The token that completes it may, or may not, be one of the least that there are to be.
        assert (await caller.run(spec(prompt, 200, stop=[stop], min_tokens=cut + 2))).text == text[:cut]
        assert text.count(stop) == 1
        assert (await caller.run(spec(prompt, 200, stop=[stop], min_tokens=cut + 3))).text == text


async def test_c64_a_slow_reader_slows_nobody_and_misses_nothing(executor: ServiceProcess) -> None:
    narrow = [("grpc.http2.lookahead_bytes", 1_024), ("grpc.http2.bdp_probe", 0)]
    async with scheduler(executor) as server, Caller(server.address, narrow) as slow, Caller(server.address) as caller:
        unread = slow.generate(spec([110], 1_000, "slow", detached=True))
        stream = await Stream().read(unread, until_tokens=0)
        fast = [await caller.run(spec([111 + index], 50)) for index in range(3)]
        assert [stream.tokens for stream in fast] == [foretold([111 + index], 50) for index in range(3)]
        await Stream().read(caller.attach("slow"))
        await stream.read(unread)
        assert stream.tokens == foretold([110], 1_000)
        assert stream.deltas < 500


async def test_a_request_whose_client_reads_nothing_expires_with_the_tokens_so_far(executor: ServiceProcess) -> None:
    narrow = [("grpc.http2.lookahead_bytes", 1_024), ("grpc.http2.bdp_probe", 0)]
    flags = ("--idle-client-timeout", "0.5")
    async with scheduler(executor, flags=flags) as server, Caller(server.address, narrow) as idle, Caller(server.address) as caller:
        unread = idle.generate(spec([115], 8_000, "idle"))
        stream = await Stream().read(unread, until_tokens=0)
        # Detached, nobody minds.
        detached = idle.generate(spec([116], 1_500, "detached", detached=True))
        await Stream().read(detached, until_tokens=0)
        life = await until_ended(caller, "idle")
        assert life.request.state == types.REQUEST_STATE_EXPIRED
        assert life.transitions[-1].reason == "its client has read nothing for 0.5 s"
        assert (await Stream().read(caller.attach("detached"))).tokens == foretold([116], 1_500)
        await stream.read(unread)
        assert stream.finished is not None
        assert stream.finished.state == types.REQUEST_STATE_EXPIRED
        assert stream.tokens == foretold([115], life.request.usage.output_tokens)


async def until_ended(caller: Caller, request_id: str) -> admin_pb2.GetRequestResponse:
    async def has_ended() -> bool:
        life = await caller.admin.GetRequest(admin_pb2.GetRequestRequest(request_id=request_id))
        return life.request.HasField("finished_at")

    await eventually(has_ended)
    return await caller.admin.GetRequest(admin_pb2.GetRequestRequest(request_id=request_id))


async def test_c73_a_database_that_refuses_writes_for_a_while(executor: ServiceProcess) -> None:
    ledger = MemoryLedger()
    async with scheduler(executor, ledger=ledger) as server, Caller(server.address) as caller:
        calls = [caller.generate(spec([120 + index], 600, f"r{index}")) for index in range(3)]
        streams = [await Stream().read(call, until_tokens=3) for call in calls]
        ledger.unavailable = True
        await wait_serving(server.address, serving=False)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await caller.submit(spec([1], 1))
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        ledger.unavailable = False
        stored = [len(ledger.output(f"r{index}").token_ids) for index in range(3)]
        assert all(len(stream.tokens) <= count for stream, count in zip(streams, stored, strict=True))
        await asyncio.gather(*[stream.read(call) for stream, call in zip(streams, calls, strict=True)])
        assert [stream.tokens for stream in streams] == [foretold([120 + index], 600) for index in range(3)]
        await wait_serving(server.address)


async def test_each_call_of_a_burst_is_answered(executor: ServiceProcess) -> None:
    async with scheduler(executor) as server, Caller(server.address) as caller:
        calls = [caller.inference.ListModels(pb.ListModelsRequest()) for _ in range(3_000)]
        answers = await asyncio.gather(*calls)
        assert all(len(answer.models) == 1 for answer in answers)


async def test_two_executors_of_one_name_are_not_both_driven(processes: Processes, executor: ServiceProcess) -> None:
    twin = processes.executor("--name", "executor", name="twin")
    with capture_logs() as logs:
        async with scheduler(executor, twin) as server:
            await eventually(lambda: _is_logged(logs, "give each executor a name of its own"))
            assert len(server.desk.executors()) == 1


async def _is_logged(logs: Sequence[MutableMapping[str, Any]], words: str) -> bool:
    return any(words in str(entry.get("reason")) for entry in logs)


async def test_two_executors_share_the_work(processes: Processes, executor: ServiceProcess) -> None:
    second = processes.executor(name="second")
    async with scheduler(executor, second, flags=("--max-num-seqs", "2")) as server, Caller(server.address) as caller:
        await eventually(lambda: _connected(server, 2))
        streams = await asyncio.gather(*[caller.run(spec([30 + index], 100)) for index in range(8)])
        assert [stream.tokens for stream in streams] == [foretold([30 + index], 100) for index in range(8)]
        assert all(status.steps > 0 for status in server.desk.executors())


async def _connected(server: SchedulerServer, count: int) -> bool:
    return len(server.desk.executors()) == count


async def test_c42_a_loop_that_stands_still_is_told_by_liveness(executor: ServiceProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    async def hangs(loop: Loop) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(Loop, "tick", hangs)
    monkeypatch.setattr(server_module, "ALIVE_WITHIN_S", 0.1)
    async with scheduler(executor) as server:
        await wait_serving(server.address, LIVENESS, serving=False)
        await wait_serving(server.address)


class _Broken(MemoryLedger):
    def prune(self, before_s: float, limit: int) -> int:
        raise RuntimeError("a mistake")


async def test_a_mistake_in_background_work_is_no_secret(executor: ServiceProcess) -> None:
    async with scheduler(executor, ledger=_Broken()) as server:
        with pytest.raises(RuntimeError, match="a mistake"):
            await asyncio.wait_for(server.loop.failure, timeout=30)


async def test_a_port_is_not_shared_with_a_second_scheduler(executor: ServiceProcess) -> None:
    async with scheduler(executor) as server:
        second = SchedulerServer(parse_settings(["--listen", server.address], {}), MemoryLedger())
        with pytest.raises(SettingsError, match="cannot be bound: choose a free address"):
            await second.start()


async def test_health_and_reflection_are_served(executor: ServiceProcess) -> None:
    async with scheduler(executor) as server, grpc.aio.insecure_channel(server.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", LIVENESS, *SERVICES):
            answer = await health.Check(health_pb2.HealthCheckRequest(service=service))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING, service
        ask = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        answers = [a async for a in reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(ask)]
        assert set(SERVICES) <= {service.name for service in answers[0].list_services_response.service}
