"""Real processes on both sides, killed, frozen and stopped: what was accepted is not lost, what was told is not changed."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator

import grpc
import pytest
from tokenmill.admin.v1 import admin_pb2
from tokenmill.inference.v1 import types_pb2 as types

from tests.fakes.calls import Caller, Stream, eventually, foretold, spec
from tests.fakes.processes import Processes, wait_serving


@pytest.fixture
def processes() -> Iterator[Processes]:
    with Processes() as running:
        yield running


async def test_c72_every_stream_of_a_killed_scheduler_goes_on_at_its_index(processes: Processes) -> None:
    executor = processes.executor("--simulated-step-ms", "20")
    scheduler = processes.scheduler(executor.address)
    await wait_serving(scheduler.address)
    prompts = [[40 + index, 50] for index in range(20)]
    async with Caller(scheduler.address) as caller:
        # Half of them detached; all with enough to do that the kill finds them in the middle.
        calls = [caller.generate(spec(prompt, 150, f"r{at}", detached=at % 2 == 0)) for at, prompt in enumerate(prompts)]
        streams = await asyncio.gather(*[Stream().read(call, until_tokens=3 + at) for at, call in enumerate(calls)])
        scheduler.kill()
        for stream, call in zip(streams, calls, strict=True):
            with pytest.raises(grpc.aio.AioRpcError):
                await stream.read(call)
    assert all(stream.finished is None for stream in streams)
    scheduler = processes.scheduler(executor.address)
    await wait_serving(scheduler.address)
    async with Caller(scheduler.address) as caller:

        async def take_up(at: int, stream: Stream) -> None:
            await stream.read(caller.attach(f"r{at}", len(stream.tokens)))

        await asyncio.gather(*[take_up(at, stream) for at, stream in enumerate(streams)])
        for at, stream in enumerate(streams):
            assert stream.tokens == foretold(prompts[at], 150)
            assert stream.finished is not None
            assert stream.finished.state == types.REQUEST_STATE_DONE
        again = await Stream().read(caller.attach("r7"))
        assert again.tokens == foretold(prompts[7], 150)


async def test_c40_requests_of_a_killed_executor_finish_when_it_is_back(processes: Processes) -> None:
    executor = processes.executor("--simulated-step-ms", "20")
    scheduler = processes.scheduler(executor.address)
    await wait_serving(scheduler.address)
    async with Caller(scheduler.address) as caller:
        calls = [caller.generate(spec([60 + index], 120, f"r{index}")) for index in range(5)]
        streams = await asyncio.gather(*[Stream().read(call, until_tokens=5) for call in calls])
        executor.kill()
        await wait_serving(scheduler.address, serving=False)

        async def is_preempted() -> bool:
            return await caller.state("r0") == types.REQUEST_STATE_PREEMPTED

        await eventually(is_preempted)
        answer = await caller.admin.GetRequest(admin_pb2.GetRequestRequest(request_id="r0"))
        assert "no executor" in answer.request.wait_reason
        late = await caller.submit(spec([70], 10, "late"))
        assert not late.joined
        processes.executor("--simulated-step-ms", "1")
        await asyncio.gather(*[stream.read(call) for stream, call in zip(streams, calls, strict=True)])
        await Stream().read(caller.attach("late"))
        await wait_serving(scheduler.address)
    assert [stream.tokens for stream in streams] == [foretold([60 + index], 120) for index in range(5)]


async def test_a_frozen_executor_is_lost_and_taken_up_again(processes: Processes) -> None:
    executor = processes.executor()
    scheduler = processes.scheduler(executor.address, flags=("--heartbeat-timeout", "2"))
    await wait_serving(scheduler.address)
    async with Caller(scheduler.address) as caller:
        call = caller.generate(spec([80], 500))
        stream = await Stream().read(call, until_tokens=3)
        executor.signal(signal.SIGSTOP)
        await wait_serving(scheduler.address, serving=False)
        executor.signal(signal.SIGCONT)
        await stream.read(call)
    assert stream.tokens == foretold([80], 500)


async def test_c45_sigterm_keeps_what_runs_and_what_waits(processes: Processes) -> None:
    executor = processes.executor("--simulated-step-ms", "100")
    flags = ("--max-num-seqs", "3")
    scheduler = processes.scheduler(executor.address, flags=flags)
    await wait_serving(scheduler.address)
    async with Caller(scheduler.address) as caller:
        calls = [caller.generate(spec([90 + index], 40, f"r{index}")) for index in range(3)]
        running = await asyncio.gather(*[Stream().read(call, until_tokens=2) for call in calls])
        calls += [caller.generate(spec([90 + index], 40, f"r{index}")) for index in range(3, 5)]
        waiting = await asyncio.gather(*[Stream().read(call, until_tokens=0) for call in calls[3:]])
        streams = [*running, *waiting]
        scheduler.signal(signal.SIGTERM)
        for stream, call in zip(streams, calls, strict=True):
            with pytest.raises(grpc.aio.AioRpcError, match=r"UNAVAILABLE[\s\S]*attach again"):
                await stream.read(call)
    assert await asyncio.to_thread(scheduler.wait) == 0
    assert all(stream.tokens == [] for stream in waiting)
    assert executor.stop() == 0
    executor = processes.executor()
    scheduler = processes.scheduler(executor.address, flags=flags)
    await wait_serving(scheduler.address)
    async with Caller(scheduler.address) as caller:
        take_up = [stream.read(caller.attach(f"r{at}", len(stream.tokens))) for at, stream in enumerate(streams)]
        await asyncio.gather(*take_up)
    assert [stream.tokens for stream in streams] == [foretold([90 + index], 40) for index in range(5)]
    assert await asyncio.to_thread(scheduler.stop) == 0


async def test_a_request_whose_client_never_comes_back_after_a_crash_is_cancelled(processes: Processes) -> None:
    executor = processes.executor("--simulated-step-ms", "20")
    scheduler = processes.scheduler(executor.address)
    await wait_serving(scheduler.address)
    async with Caller(scheduler.address) as caller:
        await Stream().read(caller.generate(spec([50], 4_000, "left")), until_tokens=1)
        await caller.submit(spec([51], 60, "kept"))
        scheduler.kill()
    scheduler = processes.scheduler(executor.address, flags=("--reattach-grace", "0.5"))
    async with Caller(scheduler.address) as caller:
        await wait_serving(scheduler.address)

        async def is_cancelled() -> bool:
            return await caller.state("left") == types.REQUEST_STATE_CANCELLED

        await eventually(is_cancelled)
        kept = await Stream().read(caller.attach("kept"))
    assert kept.tokens == foretold([51], 60)


async def test_c74_a_second_scheduler_takes_the_executor_and_the_first_stops_by_itself(processes: Processes) -> None:
    executor = processes.executor("--simulated-step-ms", "5")
    first = processes.scheduler(executor.address, name="first")
    await wait_serving(first.address)
    second = processes.scheduler(executor.address, name="second")
    await wait_serving(second.address)
    assert await asyncio.to_thread(first.wait) == 1
    async with Caller(second.address) as caller:
        assert (await caller.run(spec([40], 20))).tokens == foretold([40], 20)


def test_a_second_process_on_one_unix_path_is_told_so(processes: Processes) -> None:
    scheduler = processes.scheduler("127.0.0.1:1")
    command = [sys.executable, "-m", "tokenmill_scheduler", "--listen", scheduler.address, "--database", "sqlite:///other.db"]
    second = subprocess.run(command, capture_output=True, text=True, cwd=processes.folder, check=False)
    assert second.returncode == 2
    assert "another process listens on" in second.stderr
    assert second.stderr.count("\n") == 1
    assert scheduler.stop() == 0


def test_a_database_that_cannot_be_opened_is_an_operators_mistake(processes: Processes) -> None:
    command = [sys.executable, "-m", "tokenmill_scheduler", "--database", "sqlite:////nowhere/at/all.db"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=processes.folder, check=False)
    assert ended.returncode == 2
    assert "--database cannot be used" in ended.stderr
