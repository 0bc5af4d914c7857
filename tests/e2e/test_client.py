"""The client against real processes: a simulated executor, a scheduler that is killed, other clients."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import sys

import pytest
from tokenmill_client import (
    AsyncClient,
    AsyncStream,
    Client,
    FinishReason,
    NotFound,
    Output,
    RequestCancelled,
    RequestExpired,
    RequestState,
    RetryPolicy,
)
from tokenmill_client.options import OutputForm

from tests.fakes.calls import eventually, foretold
from tests.fakes.processes import START_TIMEOUT_S, Processes, ServiceProcess

STREAMS = 20
# A stream is long enough that none ends before the scheduler dies.
STEP_MS = "5"
TOKENS = 300


async def read_tokens(stream: AsyncStream, count: int) -> None:
    while stream.output.usage.output_tokens < count:
        await anext(stream)


def prompts(seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(32, 127) for _ in range(rng.randrange(1, 100))] for _ in range(STREAMS)]


async def test_log_probabilities_arrive_one_a_token(processes: Processes) -> None:
    """The simulated model is certain of each of its tokens. Beside a request that asked for none."""
    executor = processes.executor()
    scheduler = processes.scheduler(executor.address)
    async with AsyncClient(scheduler.address) as client:
        await client.wait_ready()
        silent = client.generate(token_ids=[8, 9], max_tokens=30)
        asking = client.generate(token_ids=[10, 11], max_tokens=20, logprobs=1)
        none, output = await asyncio.gather(silent.result(), asking.result())
        attached = await client.attach(output.request_id, 5).result()
    assert none.logprobs == ()
    assert [entry.logprob for entry in output.logprobs] == [0.0] * 20
    assert [entry.top[0][0] for entry in output.logprobs] == list(output.token_ids)
    assert attached.logprobs == output.logprobs[5:]


@pytest.mark.parametrize(("detached", "form"), [(False, "both"), (True, "both"), (False, "token_ids")])
async def test_c72_twenty_streams_survive_kill_9_of_the_scheduler(processes: Processes, detached: bool, form: OutputForm) -> None:
    """Killed twice, in the middle of all streams."""
    executor = processes.executor("--simulated-step-ms", STEP_MS)
    scheduler = processes.scheduler(executor.address)
    async with AsyncClient(scheduler.address) as client:
        await client.wait_ready()
        work = [
            (prompt, client.generate(token_ids=prompt, max_tokens=TOKENS, seed=index, detached=detached, output=form))
            for index, prompt in enumerate(prompts(1))
        ]
        for so_far in (10, 60):
            await asyncio.gather(*(read_tokens(stream, so_far + index) for index, (_, stream) in enumerate(work)))
            scheduler.kill()
            scheduler = processes.scheduler(executor.address)
        outputs = await asyncio.gather(*(stream.result() for _, stream in work))
    for index, (output, (prompt, _)) in enumerate(zip(outputs, work, strict=True)):
        assert list(output.token_ids) == foretold(prompt, TOKENS, seed=index)
        assert output.text == ("".join(map(chr, output.token_ids)) if form == "both" else "")
        assert output.usage.output_tokens == TOKENS


async def test_c72_generate_that_was_never_answered_is_sent_again(processes: Processes) -> None:
    executor = processes.executor()
    scheduler = processes.scheduler(executor.address)
    # On a busy machine a scheduler takes longer to start than a client asks by itself.
    async with AsyncClient(scheduler.address, retry=RetryPolicy(call_limit_s=START_TIMEOUT_S)) as client:
        await client.wait_ready()
        scheduler.kill()
        reading = asyncio.create_task(client.generate(token_ids=[65], max_tokens=20, seed=3).result())
        await asyncio.to_thread(processes.scheduler, executor.address)
        assert list((await reading).token_ids) == foretold([65], 20, seed=3)


async def test_c72_a_stream_that_comes_back_before_the_executor_waits_for_it(processes: Processes) -> None:
    executor = processes.executor("--simulated-step-ms", STEP_MS)
    scheduler = processes.scheduler(executor.address)
    async with AsyncClient(scheduler.address) as client:
        await client.wait_ready()
        stream = client.generate(token_ids=[75], max_tokens=100, seed=9)
        await read_tokens(stream, 10)
        scheduler.kill()
        executor.kill()
        processes.scheduler(executor.address)
        reading = asyncio.create_task(stream.result())
        # Time for attempts to attach; a request that they ended could not come back.
        await asyncio.wait([reading], timeout=1.0)
        processes.executor("--simulated-step-ms", STEP_MS)
        assert list((await reading).token_ids) == foretold([75], 100, seed=9)


async def test_c40_streams_survive_the_death_of_the_executor(processes: Processes) -> None:
    executor = processes.executor("--simulated-step-ms", STEP_MS)
    scheduler = processes.scheduler(executor.address)
    async with AsyncClient(scheduler.address) as client:
        await client.wait_ready()
        stream = client.generate(token_ids=[66], max_tokens=100, seed=4)
        await read_tokens(stream, 10)
        executor.kill()
        processes.executor("--simulated-step-ms", STEP_MS)
        assert list((await stream.result()).token_ids) == foretold([66], 100, seed=4)


@pytest.fixture
def service(processes: Processes) -> ServiceProcess:
    executor = processes.executor("--simulated-step-ms", STEP_MS)
    return processes.scheduler(executor.address)


async def test_c12_cancelled_by_another_client(service: ServiceProcess) -> None:
    async with AsyncClient(service.address) as client, AsyncClient(service.address) as other:
        await client.wait_ready()
        stream = client.generate(token_ids=[67], max_tokens=2_000, seed=5)
        await read_tokens(stream, 5)
        answer = await other.cancel(stream.request_id, "enough")
        assert (answer.state, answer.already_ended) == (RequestState.CANCELLED, False)
        with pytest.raises(RequestCancelled) as caught:
            await stream.result()
        output = caught.value.output
        assert 5 <= output.usage.output_tokens < 2_000
        assert list(output.token_ids) == foretold([67], output.usage.output_tokens, seed=5)
        life = await client.admin.get_request(stream.request_id)
        assert life.info.usage == output.usage
        assert [move.after for move in life.transitions][-1] is RequestState.CANCELLED
        # C03
        assert (await other.cancel(stream.request_id)).already_ended


async def test_c13_a_dropped_stream_cancels_its_request(service: ServiceProcess) -> None:
    async with AsyncClient(service.address) as client:
        await client.wait_ready()
        async with client.generate(token_ids=[68], max_tokens=2_048) as stream:
            await read_tokens(stream, 3)

        async def cancelled_and_free() -> bool:
            info = (await client.get_request(stream.request_id)).info
            (executor,) = await client.admin.list_executors()
            return info.state is RequestState.CANCELLED and executor.held_blocks == 0

        await eventually(cancelled_and_free)
        load = await client.admin.get_load()
        assert (load.num_requests_running, load.num_requests_waiting) == (0, 0)


async def test_a_detached_request_outlives_its_client(service: ServiceProcess) -> None:
    async with AsyncClient(service.address) as client:
        await client.wait_ready()
        async with client.generate(token_ids=[69], max_tokens=60, seed=6, detached=True) as stream:
            await read_tokens(stream, 3)
    async with AsyncClient(service.address) as client:
        output = await client.attach(stream.request_id).result()
        assert list(output.token_ids) == foretold([69], 60, seed=6)
        tail = await client.attach(stream.request_id, 58).result()
        assert list(tail.token_ids) == foretold([69], 60, seed=6)[58:]


async def test_c39_a_request_expires_with_its_tokens_so_far(service: ServiceProcess) -> None:
    async with AsyncClient(service.address) as client:
        await client.wait_ready()
        with pytest.raises(RequestExpired) as caught:
            await client.generate(token_ids=[70], max_tokens=4_000, seed=7, timeout=0.3).result()
        output = caught.value.output
        assert list(output.token_ids) == foretold([70], len(output.token_ids), seed=7)


async def test_c58_a_stop_string_cuts_the_text(service: ServiceProcess) -> None:
    text = "".join(map(chr, foretold([76], 60, seed=10)))
    stop = text[40:43]
    cut = text.index(stop)
    async with AsyncClient(service.address) as client:
        await client.wait_ready()
        output = await client.generate(token_ids=[76], max_tokens=60, seed=10, stop=stop).result()
    assert (output.text, output.finish_reason) == (text[:cut], FinishReason.STOP)
    assert output.usage.output_tokens == cut + 3 == len(output.token_ids)


def test_the_blocking_client(service: ServiceProcess) -> None:
    with Client(service.address) as client:
        client.wait_ready()
        output: Output = client.generate("hello", max_tokens=20, seed=8).result()
        ids = client.tokenize("hello").token_ids
        assert list(output.token_ids) == foretold(ids, 20, seed=8)
        submitted = client.submit(messages=[{"role": "user", "content": "hi"}], max_tokens=5)
        assert len(client.attach(submitted.request_id).result().token_ids) == 5
        assert [info.request_id for info in client.admin.list_requests(page_size=1)] == [submitted.request_id, output.request_id]
        with pytest.raises(NotFound):
            client.get_request("nobody")


async def test_a_waiting_request_is_given_priority(processes: Processes) -> None:
    executor = processes.executor("--simulated-step-ms", STEP_MS)
    scheduler = processes.scheduler(executor.address, flags=("--max-num-seqs", "1", "--policy", "priority"))
    async with AsyncClient(scheduler.address) as client:
        await client.wait_ready()
        running = client.generate(token_ids=[71], max_tokens=100)
        await read_tokens(running, 1)
        first = await client.submit(token_ids=[72], max_tokens=2)
        second = await client.submit(token_ids=[73], max_tokens=2)
        assert (await client.admin.update_request(second.request_id, priority=5)).priority == 5
        await asyncio.gather(running.result(), client.attach(first.request_id).result(), client.attach(second.request_id).result())
        ends = {info.request_id: info.finished_at async for info in client.admin.list_requests()}
        assert ends[second.request_id] < ends[first.request_id]  # type: ignore[operator]


# Prints a line once its streams are open, and reads them.
READER = """
import asyncio, sys
from tokenmill_client import AsyncClient

async def main():
    async with AsyncClient(sys.argv[1]) as client:
        streams = [client.generate(token_ids=[65, index], max_tokens=8_000) for index in range(50)]
        await asyncio.gather(*[anext(stream) for stream in streams])
        print("open", flush=True)
        await asyncio.gather(*[stream.result() for stream in streams])

asyncio.run(main())
"""


async def test_c45_a_client_that_stands_still_keeps_no_scheduler_from_ending(processes: Processes) -> None:
    """gRPC waits until such a connection is given up, for 40 s."""
    executor = processes.executor("--num-gpu-blocks-override", "32768")
    scheduler = processes.scheduler(executor.address)
    command = [sys.executable, "-c", READER, scheduler.address]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as reader:  # noqa: ASYNC220 (it is there in a millisecond)
        try:
            assert reader.stdout is not None
            assert await asyncio.to_thread(reader.stdout.readline) == b"open\n"
            reader.send_signal(signal.SIGSTOP)
            await tokens_are_made(scheduler.address, 200_000)
            assert await asyncio.to_thread(scheduler.stop) == 0
        finally:
            reader.kill()


async def tokens_are_made(address: str, count: int) -> None:
    """Returns when there are so many more than now."""
    async with AsyncClient(address) as client:
        begun = (await client.admin.get_load()).output_tokens

        async def are_made() -> bool:
            return (await client.admin.get_load()).output_tokens - begun >= count

        await eventually(are_made)


async def test_a_stream_that_nobody_reads_expires_beside_one_that_is_read(processes: Processes) -> None:
    """Both come over one call, which is read."""
    executor = processes.executor()
    scheduler = processes.scheduler(executor.address, flags=("--idle-client-timeout", "0.5"))
    async with AsyncClient(scheduler.address) as client:
        await client.wait_ready()
        unread = client.generate(token_ids=[65, 66], max_tokens=8_000, seed=1)
        await anext(unread)
        reading = asyncio.ensure_future(client.generate(token_ids=[65, 67], max_tokens=1_500, seed=1).result())

        async def has_expired() -> bool:
            return (await client.get_request(unread.request_id)).info.state is RequestState.EXPIRED

        await eventually(has_expired)
        assert list((await reading).token_ids) == foretold([65, 67], 1_500)
        with pytest.raises(RequestExpired) as expired:
            await unread.result()
        tokens = list(expired.value.output.token_ids)
        assert tokens == foretold([65, 66], len(tokens))
