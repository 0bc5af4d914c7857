"""Several choices of one prompt over gRPC on both sides: shared, streamed, ranked, cancelled, and taken up after a crash."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Unpack

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenmill_client import AsyncClient, FinishReason, InvalidRequest, QueueFull, RequestCancelled
from tokenmill_client.options import GenerateOptions
from tokenmill_client.records import RequestState
from tokenmill_scheduler.core.choices import choice_seed

from tests.fakes.calls import eventually, foretold
from tests.fakes.models import random_model
from tests.fakes.processes import Processes, ServiceProcess, wait_serving

PROMPT = [40 + number % 80 for number in range(200)]


@pytest.fixture
def processes() -> Iterator[Processes]:
    with Processes() as running:
        yield running


def expected(choice: int, count: int, seed: int = 5) -> tuple[int, ...]:
    """Of the simulated executor."""
    return tuple(foretold(PROMPT, count, choice_seed(seed, choice)))


@pytest.mark.parametrize("flags", [(), ("--no-enable-prefix-caching",)])
async def test_four_choices_compute_a_prompt_of_200_tokens_once(processes: Processes, flags: tuple[str, ...]) -> None:
    executor = processes.executor(*flags)
    scheduler = processes.scheduler(executor.address)
    await wait_serving(scheduler.address)
    async with AsyncClient(scheduler.address) as client:
        stream = client.generate(token_ids=PROMPT, n=4, max_tokens=20, seed=5, ignore_eos=True)
        outputs = await stream.results()
        assert [output.token_ids for output in outputs] == [expected(choice, 20) for choice in range(4)]
        # 12 of its 13 blocks of 16.
        assert [output.usage.cached_tokens for output in outputs] == [0, 192, 192, 192]
        assert (stream.usage.prompt_tokens, stream.usage.output_tokens) == (200, 80)
        one = await client.attach(f"{stream.request_id}/2", 15).result()
        assert one.token_ids == expected(2, 20)[15:]
        listed = [(info.request_id, info.n, info.choice, info.parent_id) async for info in client.admin.list_requests()]
        parent = stream.request_id
        assert sorted(listed) == [(parent, 4, 0, ""), *[(f"{parent}/{choice}", 4, choice, parent) for choice in (1, 2, 3)]]


async def test_c72_every_choice_of_a_killed_scheduler_goes_on_without_a_gap(processes: Processes) -> None:
    """The client takes the stream up again by itself; a group that had not run yet is there too."""
    executor = processes.executor("--simulated-step-ms", "20")
    flags = ("--max-num-seqs", "4")
    scheduler = processes.scheduler(executor.address, flags=flags)
    await wait_serving(scheduler.address)
    async with AsyncClient(scheduler.address) as client:
        stream = client.generate(token_ids=PROMPT, n=3, max_tokens=60, seed=5)
        while min(len(output.token_ids) for output in stream.outputs) < 3 or len(stream.outputs) < 3:
            await anext(stream)
        waiting = client.generate(token_ids=PROMPT, n=2, max_tokens=10, seed=6)
        reading = asyncio.create_task(waiting.results())

        async def waits() -> bool:
            return (await client.admin.get_load()).num_requests_waiting == 2

        await eventually(waits)
        scheduler.kill()
        await asyncio.gather(stream.results(), restart(processes, executor, flags))
        assert [output.token_ids for output in stream.outputs] == [expected(choice, 60) for choice in range(3)]
        assert [output.token_ids for output in await reading] == [expected(choice, 10, seed=6) for choice in range(2)]
        states = [info.state async for info in client.admin.list_requests()]
        assert states == [RequestState.DONE] * 5


async def restart(processes: Processes, executor: ServiceProcess, flags: tuple[str, ...]) -> None:
    scheduler = await asyncio.to_thread(processes.scheduler, executor.address, flags=flags)
    await wait_serving(scheduler.address)


async def test_c10_four_choices_and_three_free_slots_then_cancel(processes: Processes) -> None:
    executor = processes.executor("--simulated-step-ms", "20")
    scheduler = processes.scheduler(executor.address, flags=("--max-num-seqs", "4"))
    await wait_serving(scheduler.address)
    async with AsyncClient(scheduler.address) as client:
        await client.submit(token_ids=[50], max_tokens=500, request_id="runs", seed=1)
        stream = client.generate(token_ids=PROMPT, n=4, max_tokens=50, request_id="four")
        reading = asyncio.create_task(stream.results())

        async def runs() -> bool:
            return (await client.get_request("runs")).info.usage.output_tokens > 5

        await eventually(runs)
        infos = {info.request_id: info async for info in client.admin.list_requests()}
        four = [infos[name] for name in ("four", "four/1", "four/2", "four/3")]
        assert [info.state for info in four] == [RequestState.WAITING] * 4
        assert "admitted together" in four[3].wait_reason
        await client.cancel("four")
        with pytest.raises(RequestCancelled):
            await reading
        assert [output.finish_reason for output in stream.outputs] == [FinishReason.CANCELLED] * 4
        await client.cancel("runs")
        left = [info.state async for info in client.admin.list_requests()]
        assert left == [RequestState.CANCELLED] * 5
        load = await client.admin.get_load()
        assert (load.num_requests_running, load.num_requests_waiting) == (0, 0)


async def test_c38_n_counts_as_n_in_the_queue(processes: Processes) -> None:
    scheduler = processes.scheduler(processes.executor().address, flags=("--max-queue-len", "2"))
    await wait_serving(scheduler.address)
    async with AsyncClient(scheduler.address, retry=None) as client:
        await client.admin.pause_queue()
        await client.submit(token_ids=[50], max_tokens=5, n=2)
        for _ in range(3):
            with pytest.raises(QueueFull) as full:
                await client.submit(token_ids=[50], max_tokens=5)
            assert full.value.retry_delay_s is not None
        assert (await client.admin.get_load()).num_requests_waiting == 2


def model_folder(tmp_path: Path) -> Path:
    model = random_model("llama")
    model.save_pretrained(tmp_path)
    words = {f"w{token}": token for token in range(model.config.vocab_size)}
    Tokenizer(WordLevel(words, unk_token="w0")).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({}))
    return tmp_path


async def test_c20_choices_are_those_of_requests_with_the_derived_seeds_and_the_best_are_the_same_after_a_crash(
    processes: Processes, tmp_path: Path
) -> None:
    """A real model in float32, sampled; the pool is too small for all, so choices are preempted and come back alone."""
    executor = processes.executor(
        "--model", str(model_folder(tmp_path)), "--dtype", "float32", "--threads", "1", "--num-gpu-blocks-override", "12",
        "--no-enable-prefix-caching",
    )  # fmt: skip
    flags = ("--max-num-batched-tokens", "32", "--max-num-seqs", "8")
    scheduler = processes.scheduler(executor.address, flags=flags)
    await wait_serving(scheduler.address)
    prompt = [3 + 7 * number % 50 for number in range(40)]

    def options(**more: Unpack[GenerateOptions]) -> GenerateOptions:
        return {"token_ids": prompt, "max_tokens": 30, "ignore_eos": True, **more}

    async with AsyncClient(scheduler.address) as client:
        together = await client.generate(**options(n=4, seed=11)).results()
        assert (await client.admin.get_load()).preemptions > 0
        best = await client.generate(**options(n=2, best_of=4, seed=11, request_id="best")).results()
        rows = [await client.generate(**options(seed=choice_seed(11, choice), logprobs=0)).result() for choice in range(4)]
        assert [output.token_ids for output in together] == [row.token_ids for row in rows]
        assert len({row.token_ids for row in rows}) == 4
        means = [sum(entry.logprob for entry in row.logprobs) / len(row.logprobs) for row in rows]
        ranked = sorted(range(4), key=lambda choice: -means[choice])[:2]
        assert [output.token_ids for output in best] == [rows[choice].token_ids for choice in ranked]
        assert [output.logprobs for output in best] == [(), ()], "they were not asked for"
        scheduler.kill()
        await restart(processes, executor, flags)
        again = await client.attach("best").results()
        assert [output.token_ids for output in again] == [output.token_ids for output in best]


async def test_a_group_that_never_fits_is_refused_with_the_field(processes: Processes) -> None:
    scheduler = processes.scheduler(processes.executor().address, flags=("--max-num-seqs", "3"))
    await wait_serving(scheduler.address)
    async with AsyncClient(scheduler.address) as client:
        with pytest.raises(InvalidRequest) as refused:
            await client.submit(token_ids=[50], n=4)
        assert [field for field, _ in refused.value.violations] == ["request.sampling.n"]
