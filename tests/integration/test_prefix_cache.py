"""The prefix cache over gRPC on both sides: hits, figures, host memory, a scheduler that is killed and finds its executor warm."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from tokenmill.admin.v1 import admin_pb2

from tests.fakes.calls import Caller, foretold, spec
from tests.fakes.processes import METRICS, Processes, wait_serving
from tests.fakes.scrapes import scrape

# A block is copied sooner than its 16 tokens are computed.
HOST_MEMORY = ("--kv-offloading-size", "0.1", "--simulated-prefill-token-us", "50")
PREFIX = [40 + number % 80 for number in range(160)]


@pytest.fixture
def processes() -> Iterator[Processes]:
    with Processes() as running:
        yield running


async def _cached_tokens(caller: Caller) -> tuple[int, int]:
    load = await caller.admin.GetLoad(admin_pb2.GetLoadRequest())
    return load.prefix_cache_hits, load.prefix_cache_queries


async def test_shared_prefixes_are_hit_also_by_the_next_scheduler(processes: Processes) -> None:
    executor = processes.executor()
    flags = ("--policy", "lpm", "--max-num-batched-tokens", "64")
    scheduler = processes.scheduler(executor.address, flags=flags)
    await wait_serving(scheduler.address)
    async with Caller(scheduler.address) as caller:
        assert (await caller.run(spec(PREFIX, 4))).tokens == foretold(PREFIX, 4)
        assert await _cached_tokens(caller) == (0, 160)
        prompts = [[*PREFIX, 50 + number] for number in range(8)]
        streams = await asyncio.gather(*(caller.run(spec(prompt, 20)) for prompt in prompts))
        assert [stream.tokens for stream in streams] == [foretold(prompt, 20) for prompt in prompts]
        assert await _cached_tokens(caller) == (8 * 160, 160 + 8 * 161)
    scheduler.kill()
    scheduler = processes.scheduler(executor.address, flags=flags)
    await wait_serving(scheduler.address)
    async with Caller(scheduler.address) as caller:
        prompt = [*PREFIX, 99]
        assert (await caller.run(spec(prompt, 20))).tokens == foretold(prompt, 20)
        assert await _cached_tokens(caller) == (160, 161)


async def test_without_it_nothing_is_hit(processes: Processes) -> None:
    executor = processes.executor("--no-enable-prefix-caching")
    scheduler = processes.scheduler(executor.address)
    await wait_serving(scheduler.address)
    async with Caller(scheduler.address) as caller:
        for _ in range(2):
            assert (await caller.run(spec(PREFIX, 4))).tokens == foretold(PREFIX, 4)
        assert await _cached_tokens(caller) == (0, 0)


async def test_what_a_small_pool_evicts_is_found_in_host_memory(processes: Processes) -> None:
    """Twelve blocks hold one prompt at a time."""
    executor = processes.executor("--num-gpu-blocks-override", "12", *HOST_MEMORY)
    scheduler = processes.scheduler(executor.address, flags=("--policy", "lpm"))
    await wait_serving(scheduler.address)
    others = [[30 + number] * 160 for number in range(3)]
    async with Caller(scheduler.address) as caller:
        for prompt in (PREFIX, *others):
            assert (await caller.run(spec(prompt, 4))).tokens == foretold(prompt, 4)
        assert await _cached_tokens(caller) == (0, 4 * 160)
        prompt = [*PREFIX, 99]
        assert (await caller.run(spec(prompt, 20))).tokens == foretold(prompt, 20)
        assert await _cached_tokens(caller) == (160, 4 * 160 + 161)


async def test_c19_preempted_sequences_resume_by_swap_with_the_same_tokens(processes: Processes) -> None:
    """Four sequences of up to eleven blocks in a pool of sixteen."""
    executor = processes.executor("--num-gpu-blocks-override", "16", *METRICS, *HOST_MEMORY)
    scheduler = processes.scheduler(executor.address)
    await wait_serving(scheduler.address)
    prompts = [[50 + number] * 64 for number in range(4)]
    async with Caller(scheduler.address) as caller:
        streams = await asyncio.gather(*(caller.run(spec(prompt, 100)) for prompt in prompts))
        assert [stream.tokens for stream in streams] == [foretold(prompt, 100) for prompt in prompts]
        load = await caller.admin.GetLoad(admin_pb2.GetLoadRequest())
    seen = await scrape(executor.metrics_address)
    assert load.preemptions > 0
    assert seen("executor_kv_offload_copied_blocks_total", direction="in") > 0
    assert seen("executor_blocks", state="held") == 0
