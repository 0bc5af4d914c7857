"""Several scheduler processes on one PostgreSQL, each with its own simulated executor: killed, frozen, stopped, started again."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import grpc
import pytest
from tokenmill.admin.v1 import admin_pb2
from tokenmill.inference.v1 import inference_pb2
from tokenmill.inference.v1 import types_pb2 as types
from tokenmill_client import AsyncClient, RequestState

from tests.fakes.calls import Caller, Stream, eventually, foretold, spec
from tests.fakes.postgres import PostgresServer
from tests.fakes.processes import Processes, ServiceProcess, wait_serving

# Nobody takes over by waiting for this one to run out.
LONG = ("--lease-time", "3600")
# Time enough for a process on a busy machine to renew.
SHORT = ("--lease-time", "5")
STEPS = ("--simulated-step-ms", "20")
# Two minutes of steps: none ends before its scheduler is killed, however long a busy machine takes to come to that.
TOKENS = 6_000
# By which a stream that goes on has shown it.
MORE = 100


@dataclass
class Mill:
    """A database, executors x1 and x2, and schedulers s1 and s2, one for each."""

    processes: Processes
    database: str

    def executor(self, number: int) -> ServiceProcess:
        return self.processes.executor(*STEPS, name=f"x{number}")

    def scheduler(self, number: int, *executors: ServiceProcess, flags: tuple[str, ...]) -> ServiceProcess:
        name = f"s{number}"
        addresses = [executor.address for executor in executors]
        return self.processes.scheduler(*addresses, flags=("--scheduler-name", name, *flags), name=name, database=self.database)

    async def two(self, flags: tuple[str, ...]) -> tuple[ServiceProcess, ServiceProcess]:
        """Both ready."""
        first, second = (self.scheduler(number, self.executor(number), flags=flags) for number in (1, 2))
        await asyncio.gather(wait_serving(first.address), wait_serving(second.address))
        return first, second


@pytest.fixture
def mill(postgres: PostgresServer) -> Iterator[Mill]:
    name = postgres.create_database()
    with Processes() as processes:
        yield Mill(processes, postgres.url(name))
    postgres.drop_database(name)


async def executors_of(caller: Caller) -> list[str]:
    answer = await caller.admin.ListExecutors(admin_pb2.ListExecutorsRequest())
    assert all(bool(executor.scheduler) == executor.connected for executor in answer.executors)
    return sorted(executor.name for executor in answer.executors if executor.connected)


async def begin(caller: Caller, prefix: str, count: int) -> list[tuple[Stream, object]]:
    """Streams of so many requests, each a few tokens in; half of them detached."""
    calls = [caller.generate(spec([60 + at], TOKENS, f"{prefix}{at}", detached=at % 2 == 0)) for at in range(count)]
    streams = await asyncio.gather(*[Stream().read(call, until_tokens=2 + at) for at, call in enumerate(calls)])
    return list(zip(streams, calls, strict=True))


async def go_on(caller: Caller, prefix: str, streams: list[Stream]) -> None:
    """Each stream for a while, from where it stands, without a gap; then its request is cancelled."""

    async def take_up(at: int, stream: Stream) -> None:
        enough = len(stream.tokens) + MORE

        async def has_gone_on() -> bool:
            try:
                await stream.read(caller.attach(f"{prefix}{at}", len(stream.tokens)), until_tokens=enough)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
            return len(stream.tokens) >= enough

        await eventually(has_gone_on)
        assert stream.tokens == foretold([60 + at], len(stream.tokens))
        cancelled = await caller.inference.Cancel(inference_pb2.CancelRequest(request_id=f"{prefix}{at}"))
        assert (cancelled.state, cancelled.already_ended) == (types.REQUEST_STATE_CANCELLED, False)

    await asyncio.gather(*[take_up(at, stream) for at, stream in enumerate(streams)])


async def test_c74_a_killed_schedulers_executors_and_requests_are_taken_over(mill: Mill) -> None:
    first, second = await mill.two(SHORT)
    async with Caller(first.address) as one, Caller(second.address) as other:
        begun, own = await begin(one, "r", 6), await begin(other, "o", 2)
        await begin(one, "unwanted", 1)
        first.kill()
        # Asked for at once, carried out by its heir.
        cancelling = asyncio.ensure_future(other.inference.Cancel(inference_pb2.CancelRequest(request_id="unwanted0")))
        for stream, call in begun:
            with pytest.raises(grpc.aio.AioRpcError):
                await stream.read(call)  # type: ignore[arg-type]
        # At once: they are followed through the ledger until they are this scheduler's own.
        await go_on(other, "r", [stream for stream, _ in begun])
        assert await executors_of(other) == ["x1", "x2"]
        cancelled = await cancelling
        assert (cancelled.state, cancelled.already_ended) == (types.REQUEST_STATE_CANCELLED, False)
        for at, (stream, call) in enumerate(own):
            await stream.read(call, until_tokens=len(stream.tokens) + MORE)  # type: ignore[arg-type]
            assert stream.tokens == foretold([60 + at], len(stream.tokens))


async def test_a_request_that_only_one_executor_can_hold_goes_with_it_from_scheduler_to_scheduler(mill: Mill) -> None:
    large = mill.processes.executor(*STEPS, "--kv-cache-memory-bytes", "1GiB", name="x1")
    small = mill.processes.executor(*STEPS, "--kv-cache-memory-bytes", "16MiB", name="x2")
    first, second = mill.scheduler(1, large, flags=SHORT), mill.scheduler(2, small, flags=SHORT)
    await asyncio.gather(wait_serving(first.address), wait_serving(second.address))
    # Two minutes of steps: it runs when the first scheduler is there again, however long that takes to start.
    prompt, count = [60] * 300, 6_000
    async with Caller(first.address) as one, Caller(second.address) as other:
        stream = await Stream().read(one.generate(spec(prompt, count, "long", detached=True)), until_tokens=2)
        first.kill()
        call = other.attach("long", len(stream.tokens))
        await stream.read(call, until_tokens=len(stream.tokens) + 20)
        assert await executors_of(other) == ["x1", "x2"]
        first = mill.scheduler(1, large, flags=SHORT)
        with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
            await stream.read(call)
        # Followed through the ledger: the first scheduler has it again.
        await stream.read(other.attach("long", len(stream.tokens)), until_tokens=len(stream.tokens) + 20)
    assert stream.tokens == foretold(prompt, len(stream.tokens))
    assert "requests handed over" in second.log.read_text()


async def test_a_client_that_knows_both_addresses_goes_on_at_the_other(mill: Mill) -> None:
    first, second = await mill.two(SHORT)
    async with AsyncClient(f"{first.address},{second.address}") as client:
        streams = [client.generate(token_ids=[60 + at], max_tokens=150, seed=1, ignore_eos=True) for at in range(3)]
        for stream in streams:
            await anext(stream)
        first.kill()
        outputs = await asyncio.gather(*[stream.result() for stream in streams])
        assert [list(output.token_ids) for output in outputs] == [foretold([60 + at], 150) for at in range(3)]
        # Its calls go to the second one as well.
        assert (await client.get_request(streams[0].request_id)).info.state is RequestState.DONE


async def test_c74_a_scheduler_that_stood_still_finds_that_it_may_write_no_more_and_stops(mill: Mill) -> None:
    first, second = await mill.two(SHORT)
    async with Caller(first.address) as one, Caller(second.address) as other:
        begun = await begin(one, "r", 4)
        first.signal(signal.SIGSTOP)

        async def taken_over() -> bool:
            return await executors_of(other) == ["x1", "x2"]

        await eventually(taken_over)
        first.signal(signal.SIGCONT)
        for stream, call in begun:
            with pytest.raises(grpc.aio.AioRpcError):
                await stream.read(call)  # type: ignore[arg-type]
        assert await asyncio.to_thread(first.wait) == 1
        await go_on(other, "r", [stream for stream, _ in begun])
    log = first.log.read_text()
    assert "fenced" in log
    assert "Traceback" not in log


async def test_any_scheduler_serves_attach_cancel_and_update(mill: Mill) -> None:
    first, second = await mill.two(LONG)
    async with Caller(first.address) as one, Caller(second.address) as other:
        await one.submit(spec([60], 60, "read"))
        assert (await Stream().read(other.attach("read"))).tokens == foretold([60], 60)
        await one.submit(spec([61], 4_000, "long"))
        following = asyncio.create_task(Stream().read(other.attach("long", 0)))
        changed = await other.admin.UpdateRequest(admin_pb2.UpdateRequestRequest(request_id="long", priority=7))
        assert changed.request.priority == 7
        cancelled = await other.inference.Cancel(inference_pb2.CancelRequest(request_id="long"))
        assert (cancelled.state, cancelled.already_ended) == (types.REQUEST_STATE_CANCELLED, False)
        stream = await following
        assert stream.finished is not None
        assert stream.finished.state == types.REQUEST_STATE_CANCELLED
        assert stream.tokens == foretold([61], len(stream.tokens))
        again = await other.inference.Cancel(inference_pb2.CancelRequest(request_id="long"))
        assert again.already_ended
        joined = await other.submit(spec([60], 60, "read"))
        assert joined.joined


async def test_c13_a_reader_at_another_scheduler_keeps_a_request_and_takes_it_along(mill: Mill) -> None:
    first, second = await mill.two((*LONG, "--reattach-grace", "2"))
    async with Caller(first.address) as one, Caller(second.address) as other:
        call = one.generate(spec([60], 1_000, "r"))
        await Stream().read(call, until_tokens=2)
        away = other.attach("r")
        moved = await Stream().read(away, until_tokens=2)
        # Commands go in order: with this one, the first scheduler knows of the reader too.
        await other.admin.UpdateRequest(admin_pb2.UpdateRequestRequest(request_id="r", priority=7))
        call.cancel()
        # 150 steps of 20 ms: longer than the grace.
        await moved.read(away, until_tokens=len(moved.tokens) + 150)
        assert await other.state("r") == types.REQUEST_STATE_DECODE
        away.cancel()

        async def is_cancelled() -> bool:
            return await other.state("r") == types.REQUEST_STATE_CANCELLED

        await eventually(is_cancelled)


async def test_a_scheduler_that_stops_hands_over_at_once_and_gets_its_executor_back(mill: Mill) -> None:
    x1, x2 = mill.executor(1), mill.executor(2)
    first, second = mill.scheduler(1, x1, flags=LONG), mill.scheduler(2, x2, flags=LONG)
    await asyncio.gather(wait_serving(first.address), wait_serving(second.address))
    async with Caller(first.address) as one, Caller(second.address) as other:
        begun = await begin(one, "r", 4)
        first.signal(signal.SIGTERM)
        for stream, call in begun:
            with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
                await stream.read(call)  # type: ignore[arg-type]
        await go_on(other, "r", [stream for stream, _ in begun])
        assert await asyncio.to_thread(first.wait) == 0
        assert await executors_of(other) == ["x1", "x2"]
        first = mill.scheduler(1, x1, flags=LONG)
        await wait_serving(first.address)

        async def given_back() -> bool:
            return await executors_of(other) == ["x2"]

        await eventually(given_back)
        assert (await Caller(first.address).run(spec([70], 20))).tokens == foretold([70], 20)


async def test_a_scheduler_killed_and_started_again_under_its_name_has_what_it_had_at_once(mill: Mill) -> None:
    executor = mill.executor(1)
    first = mill.scheduler(1, executor, flags=LONG)
    await wait_serving(first.address)
    async with Caller(first.address) as caller:
        begun = await begin(caller, "r", 2)
        first.kill()
    first = mill.scheduler(1, executor, flags=LONG)
    async with Caller(first.address) as caller:
        await go_on(caller, "r", [stream for stream, _ in begun])


async def test_a_scheduler_stands_by_for_the_one_that_drives_its_executor(mill: Mill) -> None:
    executor = mill.executor(1)
    first = mill.scheduler(1, executor, flags=LONG)
    await wait_serving(first.address)
    second = mill.scheduler(2, executor, flags=LONG)
    async with Caller(first.address) as one, Caller(second.address) as other:
        begun = await begin(one, "r", 2)
        assert await executors_of(other) == []
        first.signal(signal.SIGTERM)
        await go_on(other, "r", [stream for stream, _ in begun])
        assert await executors_of(other) == ["x1"]


def test_c74_a_second_scheduler_on_a_sqlite_file_is_refused_until_the_first_has_ended() -> None:
    with Processes() as processes:
        first = processes.scheduler("127.0.0.1:1", name="first")
        database = f"sqlite:///{processes.folder / 'first'}.db"
        command = [sys.executable, "-m", "tokenmill_scheduler", "--listen", "127.0.0.1:0", "--database", database]
        refused = subprocess.run(command, capture_output=True, text=True, cwd=processes.folder, check=False)
        assert refused.returncode == 2
        assert "--database cannot be used: another scheduler runs on it" in refused.stderr
        assert refused.stderr.count("\n") == 1
        first.kill()
        assert processes.scheduler("127.0.0.1:1", name="second", database=database).stop() == 0
