"""The plan protocol as a scheduler meets it: a real server on a unix socket, with runners that can be held in mid-step."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import threading
from collections.abc import Iterator

import grpc
import pytest
import structlog.testing
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from tokenmill.executor.v1 import executor_pb2 as pb
from tokenmill_executor.block_table import BlockTable
from tokenmill_executor.blocks import BlockPool
from tokenmill_executor.runner import Batch, BlockGroup, StepOutput
from tokenmill_executor.server import SERVICE_NAME
from tokenmill_service.collector import collector_paused

from tests.fakes.runner import POISON, OracleRunner
from tests.unit.engine.conftest import Service, Start
from tests.unit.engine.plans import oracle_output
from tests.unit.engine.scheduler import FakeScheduler, admission

Code = grpc.StatusCode


@pytest.fixture
def held() -> Iterator[OracleRunner]:
    """A runner whose steps wait until its gate is opened."""
    gate = threading.Event()
    yield OracleRunner(gate=gate)
    gate.set()


def open_gate(runner: OracleRunner) -> None:
    assert runner.gate is not None
    runner.gate.set()


async def stepping(runner: OracleRunner) -> None:
    await asyncio.to_thread(runner.stepping.wait, 60)


# ---- plans and results ---------------------------------------------------------------------------------------------------------


async def test_describe_tells_what_a_scheduler_plans_with(start: Start) -> None:
    flags = ("--name=x1", "--served-model-name=tiny", "--num-gpu-blocks-override=32", "--max-num-seqs=4", "--pipeline-depth=3")
    service = await start(OracleRunner(), *flags, "--max-num-batched-tokens=64", "--block-size=4")
    description = await service.stub.Describe(pb.DescribeRequest())
    assert (description.name, description.model, description.device, description.dtype) == ("x1", "tiny", "cpu", "float32")
    assert (description.block_size, description.num_blocks, description.max_num_seqs) == (4, 32, 4)
    assert (description.max_num_batched_tokens, description.max_model_len, description.pipeline_depth) == (64, 64, 3)
    assert (description.vocab_size, list(description.eos_token_ids), description.epoch) == (1000, [0], 0)
    await service.scheduler(5)
    assert (await service.stub.Describe(pb.DescribeRequest())).epoch == 5


async def test_describe_tells_groups_with_windows_and_that_no_prefix_is_cached_then(start: Start) -> None:
    runner = OracleRunner(groups=(BlockGroup(), BlockGroup(8, 2)))
    with structlog.testing.capture_logs() as logs:
        service = await start(runner, "--num-gpu-blocks-override=32", "--block-size=4")
    description = await service.stub.Describe(pb.DescribeRequest())
    assert [(group.sliding_window, group.sinks) for group in description.block_groups] == [(0, 0), (8, 2)]
    assert (list(description.features), description.cache_version) == (["multi_step"], "")
    assert [line["event"] for line in logs].count("prefix caching unused") == 1
    scheduler = await service.scheduler(1)
    await scheduler.send({1: 40}, [admission(1, [5] * 40, max_tokens=3)])
    # 41 positions of the first group, and of the other two sinks and the seven before the next token.
    held = (await scheduler.result()).blocks.held
    assert held == 10 + 1 + 2


async def test_the_tokenizer_comes_in_pieces_below_one_mebibyte_and_matches_its_digest(start: Start) -> None:
    service = await start(OracleRunner())
    files: dict[str, bytes] = {}
    async for piece in service.stub.GetTokenizer(pb.GetTokenizerRequest()):
        assert len(piece.SerializeToString()) < 1 << 20
        files[piece.name] = files.get(piece.name, b"") + piece.content
    assert files == OracleRunner().tokenizer_files()
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(f"{name}\0{len(files[name])}\0".encode() + files[name])
    assert (await service.stub.Describe(pb.DescribeRequest())).tokenizer_digest == digest.hexdigest()


async def test_two_plans_out_at_once_feed_each_other_the_sampled_tokens(start: Start) -> None:
    service = await start(OracleRunner(), "--block-size=4")
    scheduler = await service.scheduler(1)
    await scheduler.send({1: 9}, [admission(1, [5, 6])])
    await scheduler.send({1: 1})
    tokens: list[int] = []
    for plan_id in range(1, 9):
        result = await scheduler.result()
        assert (result.epoch, result.plan_id, list(result.sequence_ids)) == (1, plan_id, [1])
        tokens += result.token_ids
        if plan_id < 7:
            await scheduler.send({1: 1})
    assert tokens == oracle_output([5, 6], 8)
    assert list(result.finishes) == [pb.SEQUENCE_FINISH_LENGTH]
    assert result.blocks.held == 0
    assert result.blocks.free + result.blocks.cached == (await service.stub.Describe(pb.DescribeRequest())).num_blocks


async def test_a_scheduler_that_comes_anew_is_told_what_is_cached_and_hits_it(start: Start) -> None:
    service = await start(OracleRunner(), "--block-size=4")
    described = await service.stub.Describe(pb.DescribeRequest())
    assert list(described.features) == ["multi_step", "prefix_caching"]
    assert (described.prefix_caching_hash_algo, described.cache_version) == ("sha256", "oracle float32 auto")
    old = await service.scheduler(1)
    await old.send({1: 64}, [admission(1, [5] * 9)])
    first = await old.result()
    assert (len(first.stored), list(first.num_cached), list(first.stored_parents)) == (2, [], [0, first.stored[0]])
    await old.goodbye()
    await old.ended()
    new = FakeScheduler(service.stub, 2)
    welcome = await new.hello()
    assert (welcome.stored, welcome.stored_parents) == (first.stored, first.stored_parents)
    await new.send({1: 1}, [admission(1, [5] * 9)])
    second = await new.result()
    assert (list(second.num_cached), list(second.num_computed), second.token_ids) == ([8], [1], first.token_ids)
    assert not second.stored


async def test_prefix_caching_can_be_turned_off(start: Start) -> None:
    service = await start(OracleRunner(), "--block-size=4", "--no-enable-prefix-caching")
    described = await service.stub.Describe(pb.DescribeRequest())
    assert (list(described.features), described.prefix_caching_hash_algo, described.cache_version) == (["multi_step"], "", "")
    scheduler = await service.scheduler(1)
    for sequence_id in (1, 2):
        await scheduler.send({sequence_id: 64}, [admission(sequence_id, [5] * 9)])
        result = await scheduler.result()
        assert (list(result.num_cached), list(result.stored), result.blocks.cached) == ([], [], 0)


async def test_c43_a_failing_sequence_is_named_and_the_stream_goes_on(start: Start) -> None:
    service = await start(OracleRunner())
    scheduler = await service.scheduler(1)
    await scheduler.send({1: 9, 2: 9, 3: 9}, [admission(1, [1]), admission(2, [POISON]), admission(3, [3])])
    with structlog.testing.capture_logs() as logs:
        result = await scheduler.result()
    assert (result.epoch, result.plan_id) == (1, 1)
    assert [(fault.sequence_id, fault.fault) for fault in result.faults] == [(2, pb.SEQUENCE_FAULT_ERROR)]
    (told,) = [line for line in logs if line["event"] == "sequence failed"]
    assert (told["epoch"], told["plan"], told["sequence"], told["reason"]) == (1, 1, 2, "RuntimeError: poisoned input")
    await scheduler.send({1: 1, 3: 1})
    assert list((await scheduler.result()).num_computed) == [1, 1]


async def test_c57_a_plan_with_512_new_requests_and_one_with_a_prompt_of_300k_tokens(start: Start) -> None:
    service = await start(OracleRunner(max_model_len=512), "--max-num-seqs=512", "--num-gpu-blocks-override=1024")
    scheduler = await service.scheduler(1)
    ids = list(range(1, 513))
    await scheduler.send(dict.fromkeys(ids, 10), [admission(index, [index] * 10) for index in ids])
    result = await scheduler.result()
    assert list(result.num_sampled) == [1] * 512
    assert result.token_ids[511] == oracle_output([512] * 10, 1)[0]
    await scheduler.send({1: 1, 600: 100}, [admission(600, [7] * 300_000)])
    result = await scheduler.result()
    assert [(fault.sequence_id, fault.fault) for fault in result.faults] == [(600, pb.SEQUENCE_FAULT_ERROR)]
    assert "max_model_len" in result.faults[0].detail
    assert list(result.num_computed) == [1, 0]


async def test_c57_a_message_over_the_limit_ends_the_stream_and_not_the_channel(start: Start) -> None:
    service = await start(OracleRunner(), "--max-message-bytes=64KiB")
    scheduler = await service.scheduler(1)
    await scheduler.send({1: 1}, [admission(1, [100_000] * 50_000)])
    code, _ = await scheduler.ended()
    assert code is Code.RESOURCE_EXHAUSTED
    again = await service.scheduler(2)
    await again.send({1: 9}, [admission(1, [5])])
    assert list((await again.result()).token_ids) == oracle_output([5], 1)


async def test_times_tell_idle_from_busy(start: Start, held: OracleRunner) -> None:
    service = await start(held)
    scheduler = await service.scheduler(1)
    await scheduler.send({1: 9}, [admission(1, [5])])
    await stepping(held)
    await scheduler.send({1: 1})
    # Nothing tells when the second has arrived but the answer to what follows it on the same stream.
    open_gate(held)
    first, second = (await scheduler.result()).times, (await scheduler.result()).times
    assert first.idle_us > 0
    assert (first.forward_us, first.sample_us) == (1000, 500)
    assert second.queue_us >= 0


class Forgetful(OracleRunner):
    """Breaks its contract: gives one token too few, once."""

    def step(self, batch: Batch) -> StepOutput:
        output = super().step(batch)
        if self.num_steps == 1:
            output.token_ids.pop()
        return output


async def test_a_fault_of_the_executor_itself_ends_the_stream_and_the_next_epoch_is_served(start: Start) -> None:
    service = await start(Forgetful())
    scheduler = await service.scheduler(1)
    await scheduler.send({1: 9, 2: 9}, [admission(1, [5]), admission(2, [6])])
    assert await scheduler.ended() == (Code.INTERNAL, "plan 1 failed in the engine; see the executor's log")
    again = await service.scheduler(2)
    await again.send({1: 9}, [admission(1, [5])])
    result = await again.result()
    assert list(result.token_ids) == oracle_output([5], 1)
    assert result.blocks.held == 1


async def test_a_lost_device_ends_the_stream_and_the_service(start: Start) -> None:
    runner = OracleRunner()
    service = await start(runner)
    scheduler = await service.scheduler(1)
    await scheduler.send({1: 9}, [admission(1, [5])])
    await scheduler.result()
    runner.lost = True
    await scheduler.send({1: 1})
    await scheduler.send({1: 1})
    assert await scheduler.ended() == (Code.UNAVAILABLE, "the executor has lost its device and ends")
    await asyncio.wait_for(service.server.servicer.failed.wait(), 30)


async def test_an_engine_whose_books_are_wrong_serves_no_more(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    def leak(pool: BlockPool, table: BlockTable) -> None:
        table.clear()

    service = await start(OracleRunner())
    scheduler = await service.scheduler(1)
    await scheduler.send({1: 9}, [admission(1, [5])])
    await scheduler.result()
    monkeypatch.setattr(BlockPool, "release", leak)
    await scheduler.goodbye()
    await asyncio.wait_for(service.server.servicer.failed.wait(), 30)


# ---- who drives ----------------------------------------------------------------------------------------------------------------


async def test_c05_a_higher_epoch_waits_for_the_step_in_progress_and_finds_no_block_held(start: Start, held: OracleRunner) -> None:
    service = await start(held, "--num-gpu-blocks-override=8", "--block-size=4")
    old = await service.scheduler(3)
    await old.send({1: 9}, [admission(1, [1] * 9)])
    await old.send({1: 1})
    await stepping(held)
    new = FakeScheduler(service.stub, 4)
    welcome = asyncio.create_task(new.hello())
    code, detail = await old.ended()
    assert (code, detail) == (Code.ABORTED, "a scheduler with epoch 4 has taken over")
    assert not welcome.done()
    open_gate(held)
    assert ((await welcome).epoch, (await welcome).blocks) == (4, pb.Blocks(free=6, cached=2))
    # The old epoch's second plan was never carried out, and its sequence is unknown.
    assert held.num_steps == 1
    await new.send({1: 1})
    assert list((await new.result()).num_computed) == [0]


@pytest.mark.parametrize("epoch", [0, 4, 5])
async def test_an_epoch_at_or_below_the_highest_is_refused_and_disturbs_nobody(start: Start, epoch: int) -> None:
    service = await start(OracleRunner())
    scheduler = await service.scheduler(5)
    code, detail = await FakeScheduler(service.stub, epoch).hello_refused()
    assert (code, detail) == (Code.FAILED_PRECONDITION, f"hello.epoch is {epoch}, the highest seen is 5: take a higher one")
    await scheduler.send({1: 9}, [admission(1, [5])])
    assert list((await scheduler.result()).token_ids) == oracle_output([5], 1)


@pytest.mark.parametrize("half_closes", [False, True])
async def test_after_goodbye_queued_plans_are_answered_and_everything_is_released(
    start: Start, held: OracleRunner, half_closes: bool
) -> None:
    service = await start(held)
    scheduler = await service.scheduler(1)
    await scheduler.send({1: 9}, [admission(1, [5])])
    await scheduler.send({1: 1})
    await scheduler.goodbye()
    if half_closes:
        await scheduler.call.done_writing()
    open_gate(held)
    tokens = [*(await scheduler.result()).token_ids, *(await scheduler.result()).token_ids]
    assert tokens == oracle_output([5], 2)
    assert await scheduler.ended() == (Code.OK, "")
    assert (await service.blocks()).held == 0


@pytest.mark.parametrize("way", ["cancel", "half_close", "channel"])
async def test_a_scheduler_that_is_gone_leaves_no_sequence_and_no_queued_plan(start: Start, held: OracleRunner, way: str) -> None:
    service = await start(held)
    options = [("grpc.use_local_subchannel_pool", 1)]
    channel = grpc.aio.insecure_channel(service.server.address, options=options)
    scheduler = await Service(service.server, channel).scheduler(1)
    await scheduler.send({1: 9}, [admission(1, [5])])
    await scheduler.send({1: 1})
    await stepping(held)
    if way == "cancel":
        scheduler.call.cancel()
    elif way == "half_close":
        await scheduler.call.done_writing()
        await scheduler.ended()
    await channel.close(None)
    await service.server.servicer.idle()
    open_gate(held)
    assert (await service.blocks()).held == 0
    assert held.num_steps == 1


async def test_c42_heartbeats_come_while_a_long_step_runs(start: Start, held: OracleRunner) -> None:
    service = await start(held, heartbeat_interval_s=0.01)
    scheduler = await service.scheduler(1)
    await scheduler.send({1: 9}, [admission(1, [5])])
    await stepping(held)
    beats = [await scheduler.heartbeat() for _ in range(5)]
    assert (beats[-1].running_plan_id, beats[-1].answered_plan_id) == (1, 0)
    open_gate(held)
    assert (await scheduler.result()).plan_id == 1
    while (beat := await scheduler.heartbeat()).answered_plan_id == 0:
        pass
    assert (beat.running_plan_id, beat.answered_plan_id) == (0, 1)


# ---- bad plans -----------------------------------------------------------------------------------------------------------------


BAD = {
    "plan.epoch is 2": pb.Plan(epoch=2, plan_id=1),
    "plan.plan_id is 2": pb.Plan(epoch=1, plan_id=2),
    "plan.advance_max_tokens has 1 entries": pb.Plan(epoch=1, plan_id=1, advance_sequence_ids=[1, 2], advance_max_tokens=[1]),
    "plan.advance_sequence_ids has 3": pb.Plan(epoch=1, plan_id=1, advance_sequence_ids=[1, 2, 3], advance_max_tokens=[1, 1, 1]),
    "plan.advance_sequence_ids names": pb.Plan(epoch=1, plan_id=1, advance_sequence_ids=[1, 1], advance_max_tokens=[1, 1]),
    "plan.advance_max_tokens adds up to 65": pb.Plan(epoch=1, plan_id=1, advance_sequence_ids=[1], advance_max_tokens=[65]),
    "plan.admit[0].sampling.logit_bias_values": pb.Plan(
        epoch=1,
        plan_id=1,
        admit=[pb.Admission(sequence_id=1, token_ids=[1], num_prompt_tokens=1, sampling=pb.Sampling(logit_bias_ids=[1]))],
    ),
}


@pytest.mark.parametrize("words", BAD)
async def test_a_plan_that_cannot_be_carried_out_ends_the_stream_and_names_the_field(start: Start, words: str) -> None:
    service = await start(OracleRunner(), "--max-num-seqs=2", "--max-num-batched-tokens=64")
    scheduler = await service.scheduler(1)
    await scheduler.call.write(pb.RunRequest(plan=BAD[words]))
    code, detail = await scheduler.ended()
    assert code is Code.INVALID_ARGUMENT
    assert detail.startswith(words)
    assert (await FakeScheduler(service.stub, 2).hello()).epoch == 2


async def test_more_plans_than_the_pipeline_holds_end_the_stream(start: Start, held: OracleRunner) -> None:
    service = await start(held)
    scheduler = await service.scheduler(1)
    await scheduler.send({1: 9}, [admission(1, [5])])
    await scheduler.send({1: 1})
    await scheduler.send({1: 1})
    code, detail = await scheduler.ended()
    assert code is Code.RESOURCE_EXHAUSTED
    assert detail == "plan 3 came while 2 were unanswered, pipeline_depth is no more"


@pytest.mark.parametrize("message", [pb.RunRequest(), pb.RunRequest(plan=pb.Plan()), pb.RunRequest(goodbye=pb.Goodbye())])
async def test_a_stream_must_begin_with_hello(start: Start, message: pb.RunRequest) -> None:
    service = await start(OracleRunner())
    scheduler = FakeScheduler(service.stub, 1)
    await scheduler.call.write(message)
    assert await scheduler.ended() == (Code.INVALID_ARGUMENT, "the first message must be hello")


@pytest.mark.parametrize(
    ("message", "detail"), [(pb.RunRequest(), "message is empty"), (pb.RunRequest(hello=pb.Hello(epoch=9)), "hello")]
)
async def test_a_message_that_makes_no_sense_ends_the_stream(start: Start, message: pb.RunRequest, detail: str) -> None:
    service = await start(OracleRunner())
    scheduler = await service.scheduler(1)
    await scheduler.call.write(message)
    code, text = await scheduler.ended()
    assert code is Code.INVALID_ARGUMENT
    assert text.startswith(detail)


# ---- life of the service -------------------------------------------------------------------------------------------------------


async def health_of(service: Service, name: str) -> int:
    stub = health_pb2_grpc.HealthStub(service.channel)
    response = await stub.Check(health_pb2.HealthCheckRequest(service=name))
    return int(response.status)


async def turned(service: Service, status: int) -> None:
    """Returns once health says `status`."""
    watch = health_pb2_grpc.HealthStub(service.channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE_NAME))
    async for response in watch:
        if response.status == status:
            watch.cancel()
            return


async def test_before_the_model_is_loaded_health_is_not_serving_and_calls_are_unavailable(start: Start) -> None:
    service = await start(OracleRunner(), load=False)
    assert await health_of(service, SERVICE_NAME) == health_pb2.HealthCheckResponse.NOT_SERVING
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await service.stub.Describe(pb.DescribeRequest())
    assert (caught.value.code(), caught.value.details()) == (Code.UNAVAILABLE, "the model is still loading")
    assert await FakeScheduler(service.stub, 1).hello_refused() == (Code.UNAVAILABLE, "the model is still loading")
    await service.server.load()
    for name in ("", SERVICE_NAME):
        assert await health_of(service, name) == health_pb2.HealthCheckResponse.SERVING


async def test_who_gives_time_is_described_the_executor_as_soon_as_it_is_loaded(start: Start) -> None:
    service = await start(OracleRunner(), load=False)
    describing = asyncio.ensure_future(service.stub.Describe(pb.DescribeRequest(), timeout=60.0))
    # The server has the call once it answers a later one on the same connection.
    assert await health_of(service, SERVICE_NAME) == health_pb2.HealthCheckResponse.NOT_SERVING
    assert not describing.done()
    await service.server.load()
    assert (await describing).num_blocks > 0


def test_the_collector_runs_again_after_loading() -> None:
    with collector_paused():
        assert not gc.isenabled()
    assert gc.isenabled()
    assert gc.get_freeze_count() > 0
    gc.unfreeze()


async def test_reflection_lists_the_service(start: Start) -> None:
    service = await start(OracleRunner())
    stub = reflection_pb2_grpc.ServerReflectionStub(service.channel)
    call = stub.ServerReflectionInfo()
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    response = await call.read()
    assert SERVICE_NAME in [entry.name for entry in response.list_services_response.service]
    call.cancel()


async def test_shutdown_answers_the_plans_in_hand_and_takes_no_stream(start: Start, held: OracleRunner) -> None:
    service = await start(held)
    scheduler = await service.scheduler(1)
    await scheduler.send({1: 9}, [admission(1, [5])])
    await stepping(held)
    stopping = asyncio.create_task(service.stop())
    await turned(service, health_pb2.HealthCheckResponse.NOT_SERVING)
    assert (await FakeScheduler(service.stub, 2).hello_refused())[0] is Code.UNAVAILABLE
    open_gate(held)
    assert list((await scheduler.result()).token_ids) == oracle_output([5], 1)
    assert await scheduler.ended() == (Code.UNAVAILABLE, "the executor is shutting down")
    await stopping
