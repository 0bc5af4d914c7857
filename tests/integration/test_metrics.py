"""What a scrape of a running service says, over HTTP: the scheduler in this process, simulated executors as processes."""

from __future__ import annotations

import asyncio
import signal
import socket
import urllib.error
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from tokenmill.admin.v1 import admin_pb2
from tokenmill.inference.v1 import inference_pb2 as pb
from tokenmill.inference.v1 import types_pb2 as types
from tokenmill_scheduler.server import SchedulerServer
from tokenmill_scheduler.settings import parse_settings
from tokenmill_service.flags import SettingsError
from tokenmill_service.metrics import MetricsServer

from tests.fakes.calls import Caller, Stream, eventually, spec
from tests.fakes.memory_ledger import MemoryLedger
from tests.fakes.processes import METRICS, Processes, ServiceProcess, wait_serving
from tests.fakes.scrapes import Scrape, scrape, scrape_now

BLOCK_SIZE = 256


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    with Processes() as running:
        yield running


@pytest.fixture(scope="module")
def executor(processes: Processes) -> ServiceProcess:
    """Ten blocks, and steps of a length that a test can step in between."""
    flags = ("--num-gpu-blocks-override", "10", "--block-size", str(BLOCK_SIZE), "--simulated-step-ms", "10")
    return processes.executor(*flags)


@asynccontextmanager
async def scheduler(*executors: ServiceProcess, flags: tuple[str, ...] = ()) -> AsyncIterator[SchedulerServer]:
    addresses = [part for process in executors for part in ("--executor", process.address)]
    settings = parse_settings(["--listen", "127.0.0.1:0", "--metrics-address", "127.0.0.1:0", *addresses, *flags], {})
    server = SchedulerServer(settings, MemoryLedger())
    await server.start()
    try:
        await wait_serving(server.address)
        yield server
    finally:
        await server.stop()


def occupancy(seen: Scrape) -> tuple[float, float]:
    return seen("num_requests_running"), seen("num_requests_waiting")


async def test_c68_cancel_everything_and_the_gauges_read_0_within_one_scrape(executor: ServiceProcess) -> None:
    async with scheduler(executor, flags=("--max-num-seqs", "4")) as server, Caller(server.address) as caller:
        await caller.admin.PauseQueue(admin_pb2.PauseQueueRequest())
        for index in range(12):
            await caller.submit(spec([40 + index] * 20, 200, f"r{index}"))
        # All at once: those that run are seen before the first of them has ended.
        await caller.admin.ResumeQueue(admin_pb2.ResumeQueueRequest())

        async def full() -> bool:
            seen = await scrape(server.metrics_address)
            by_reason = seen("requests_waiting_by_reason"), seen("requests_waiting_by_reason", reason="no_slot")
            return occupancy(seen) == (4, 8) and by_reason == (8, 8) and seen("kv_cache_usage_perc") == 0.4

        await eventually(full)
        answer = await caller.admin.CancelRequests(
            admin_pb2.CancelRequestsRequest(filter=admin_pb2.RequestFilter(min_priority=-100))
        )
        assert len(answer.outcomes) == 12
        first = await scrape(server.metrics_address)
        assert occupancy(first) == (0, 0)
        assert first("requests_waiting_by_reason") == 0
        assert first("oldest_wait_seconds") == 0
        assert first("request_success_total", finished_reason="cancelled") == 12

        async def idle() -> bool:
            # The blocks are back with the step in progress.
            seen = await scrape(server.metrics_address)
            return seen("kv_cache_usage_perc") == seen("kv_blocks", state="held") == seen("batch_occupancy_perc") == 0

        await eventually(idle)


async def test_c69_every_submit_is_one_end_and_every_first_token_one_sample(processes: Processes) -> None:
    """More than the blocks hold, so that requests are preempted and resumed; some are cancelled, some expire, one fails."""
    small = processes.executor("--num-gpu-blocks-override", "8", "--block-size", "16", name="small")
    async with (
        scheduler(small, flags=("--max-num-seqs", "8", "--watermark", "0")) as server,
        Caller(server.address) as caller,
    ):
        # The first outgrows the pool. The last never run: the queue time of two is over at once, two are cancelled while they wait.
        await caller.admin.PauseQueue(admin_pb2.PauseQueueRequest())
        await caller.submit(spec([33] * 100, 120, "fails"))
        for index in range(8):
            await caller.submit(spec([40 + index] * 20, 40, f"r{index}"))
        for index in range(2):
            await caller.submit(spec([60] * 20, 40, f"late{index}", queue_timeout=Duration(nanos=1_000_000)))
            await Stream().read(caller.attach(f"late{index}"))
        for index in range(2):
            await caller.submit(spec([70] * 20, 100, f"gone{index}"))
            await caller.inference.Cancel(pb.CancelRequest(request_id=f"gone{index}"))
        await caller.admin.ResumeQueue(admin_pb2.ResumeQueueRequest())

        async def over() -> bool:
            return occupancy(await scrape(server.metrics_address)) == (0, 0)

        await eventually(over)
        seen = await scrape(server.metrics_address)
        ended = (await caller.admin.ListRequests(admin_pb2.ListRequestsRequest(page_size=100))).requests
        reasons = [types.FinishReason.Name(info.finish_reason).removeprefix("FINISH_REASON_").lower() for info in ended]
        assert {reason: seen("request_success_total", finished_reason=reason) for reason in set(reasons)} == {
            reason: reasons.count(reason) for reason in set(reasons)
        }
        assert {"length", "cancelled", "expired", "error"} <= set(reasons)
        assert seen("request_success_total") == seen("requests_accepted_total") == len(ended) == 13
        assert seen("num_preemptions_total", reason="out_of_blocks") > 0
        assert seen("out_of_memory_events_total", event="preempted") == seen("num_preemptions_total", reason="out_of_blocks")
        assert seen("time_to_first_token_seconds_count") == sum(info.usage.output_tokens > 0 for info in ended)
        tokens = sum(info.usage.output_tokens for info in ended)
        assert seen("inter_token_latency_seconds_count") == tokens - seen("time_to_first_token_seconds_count")
        assert seen("generation_tokens_total") == tokens
        assert seen("e2e_request_latency_seconds_count") == reasons.count("length")


async def test_c70_kv_usage_is_held_over_all_and_cached_counts_as_free(executor: ServiceProcess) -> None:
    async with scheduler(executor) as server, Caller(server.address) as caller:
        await caller.run(spec([50] * 300, 2, "first"))
        seen = await scrape(server.metrics_address)
        assert seen("kv_cache_usage_perc") == 0
        assert seen("kv_blocks", state="cached") > 0
        before = seen("kv_blocks", state="cached")
        # Its 300 tokens fill a block and part of a second, which 200 more do not outgrow.
        call = caller.generate(spec([51] * 300, 200, "second"))
        await Stream().read(call, until_tokens=1)
        executor.signal(signal.SIGSTOP)
        try:
            seen = await scrape(server.metrics_address)
        finally:
            executor.signal(signal.SIGCONT)
        states = {state: seen("kv_blocks", state=state) for state in ("held", "cached", "free")}
        assert states == {"held": 2, "cached": before, "free": 10 - 2 - before}
        assert seen("kv_cache_usage_perc") == 0.2
        await caller.inference.Cancel(pb.CancelRequest(request_id="second"))


async def test_the_first_four_figures_and_what_a_step_costs(executor: ServiceProcess) -> None:
    async with scheduler(executor, flags=("--max-num-seqs", "2")) as server, Caller(server.address) as caller:
        await asyncio.gather(*[caller.run(spec([80 + index] * 300, 5)) for index in range(4)])
        seen = await scrape(server.metrics_address)
        steps = seen("steps_total")
        assert seen("scheduling_delay_seconds_count", lane="standard", policy="fcfs") == 4
        assert seen("request_queue_time_seconds_count") == 4
        assert (
            seen("batch_occupancy_count")
            == seen("iteration_tokens_total_count")
            == steps
            >= seen("plan_round_trip_seconds_count")
            > 0
        )
        assert seen("iteration_tokens_total_sum") >= seen("prompt_tokens_total") == 1_200
        assert seen("batch_occupancy_bucket", le="1.0") == steps
        assert 0 < seen("batch_occupancy_sum") <= steps
        assert seen("ledger_lag_seconds_count") > 0
        assert 0 < seen("ledger_commits_total") <= seen("ledger_records_total")
        assert seen("ledger_backlog") == seen("stale_results_total") == seen("streams_open") == 0
        assert seen("executor_up", executor="executor") == 1
        assert seen("scheduler_info", policy="fcfs", batching="continuous") == 1
        load = await caller.admin.GetLoad(admin_pb2.GetLoadRequest())
        assert [(lane.lane, lane.running, lane.waiting) for lane in load.lanes] == [(lane, 0, 0) for lane in (1, 2, 3)]
        assert sum(load.time_to_first_token.counts) == sum(load.request_queue_time.counts) == 4
        assert sum(load.inter_token_latency.counts) == 4 * 4
        assert load.inter_token_latency.sum == pytest.approx(seen("inter_token_latency_seconds_sum"))
        assert load.batch_occupancy_sum == pytest.approx(seen("batch_occupancy_sum"))
        assert dict(load.finished) == {"stop": 0, "length": 4, "cancelled": 0, "expired": 0, "error": 0}


async def test_refused_submits_are_counted_by_reason(executor: ServiceProcess) -> None:
    async with scheduler(executor, flags=("--max-queue-len", "1")) as server, Caller(server.address) as caller:
        await caller.admin.PauseQueue(admin_pb2.PauseQueueRequest())
        await caller.submit(spec([50], 3, "waits"))
        for wrong in (spec([50], 3), spec([50], 3), spec([], 3), spec([51], 3, "waits")):
            with pytest.raises(grpc.aio.AioRpcError):
                await caller.submit(wrong)
        with pytest.raises(grpc.aio.AioRpcError):
            await caller.run(spec([50], 0))
        with pytest.raises(grpc.aio.AioRpcError):
            await caller.state("unknown")
        seen = await scrape(server.metrics_address)
        assert seen("requests_refused_total") == 5, "and what asks about requests is no submit"
        assert seen("requests_refused_total", reason="QUEUE_FULL") == 2
        assert seen("requests_refused_total", reason="INVALID_ARGUMENT") == 2
        assert seen("requests_refused_total", reason="REQUEST_EXISTS") == 1
        assert seen("queue_paused") == 1
        await caller.inference.Cancel(pb.CancelRequest(request_id="waits"))
        await caller.admin.ResumeQueue(admin_pb2.ResumeQueueRequest())


async def test_an_executor_tells_of_its_steps_and_blocks(processes: Processes) -> None:
    process = processes.executor(*METRICS, "--num-gpu-blocks-override", "4", "--block-size", "16", name="watched")
    seen = await scrape(process.metrics_address)
    assert seen("executor_blocks", state="free") == 4
    assert seen("executor_info", name="watched", model="simulated") == 1
    async with scheduler(process) as server, Caller(server.address) as caller:
        for prompt in (50, 51, 52):
            await caller.run(spec([prompt] * 40, 8))
        theirs, seen = await scrape(server.metrics_address), await scrape(process.metrics_address)
    assert seen("executor_steps_total") == theirs("steps_total")
    assert seen("executor_sampled_tokens_total") == 24
    assert seen("executor_computed_tokens_total") == theirs("iteration_tokens_total_sum") == 3 * (40 + 7)
    assert seen("executor_step_seconds_count", part="queue") == seen("executor_plans_total") <= seen("executor_steps_total")
    for part in ("prepare", "forward", "sample"):
        assert seen("executor_step_seconds_count", part=part) == seen("executor_steps_total")
    assert seen("executor_step_seconds_sum", part="forward") > 0
    assert seen("executor_evicted_blocks_total") > 0, "three prompts fill more than four blocks"
    assert sum(seen("executor_blocks", state=state) for state in ("free", "cached", "held")) == 4
    assert seen("executor_plans_queued") == seen("executor_faults_total") == 0
    ours = {name for name in seen.names if name.startswith("tokenmill_")}
    assert ours.isdisjoint(theirs.names), "two services never mean different things by one name"


def test_a_scrape_that_the_loop_does_not_answer_is_a_503(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenmill_service.metrics._ANSWER_LIMIT_S", 0.05)

    async def start() -> MetricsServer:
        return MetricsServer("127.0.0.1:0", list)

    with asyncio.Runner() as runner:
        server = runner.run(start())
        # Nothing turns the loop now.
        with pytest.raises(urllib.error.HTTPError, match="503"):
            scrape_now(server.address)
        runner.run(server.stop())


async def test_an_address_that_is_taken_or_none_is_an_operators_mistake() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(SettingsError, match="cannot be bound"):
            MetricsServer(f"127.0.0.1:{taken.getsockname()[1]}", list)
    for wrong in ("9090", "unix:/tmp/s", "host:port"):
        with pytest.raises(SettingsError, match="--metrics-address"):
            parse_settings(["--metrics-address", wrong], {})
    assert parse_settings([], {}).metrics_address == ""
