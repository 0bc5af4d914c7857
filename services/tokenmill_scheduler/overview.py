"""What there is to see of a scheduler: its load, and the executors it drives. Changes nothing.

Must not know: protobuf, SQL, who looks.
"""

from __future__ import annotations

from dataclasses import replace
from time import monotonic

from tokenmill_scheduler.core.plans import ExecutorDescription
from tokenmill_scheduler.desk.records import ExecutorStatus, Load
from tokenmill_scheduler.loop import Loop


def load(loop: Loop, ledger_backlog: int) -> Load:
    """`ledger_backlog`: records that are not durable yet."""
    scheduler, counters = loop.scheduler, loop.scheduler.counters
    metrics, running = loop.metrics, scheduler.running_by_lane()
    return Load(
        num_requests_running=sum(running.values()),
        num_requests_waiting=scheduler.num_waiting,
        max_num_seqs=scheduler.config.max_num_seqs,
        max_num_batched_tokens=scheduler.config.max_num_batched_tokens,
        kv_cache_usage=scheduler.kv_cache_usage,
        batch_occupancy=counters.occupancy_sum / counters.steps if counters.steps else 0.0,
        preemptions=counters.preemptions,
        output_tokens=counters.output_tokens,
        prompt_tokens=counters.prompt_tokens,
        steps=counters.steps,
        stale_results=counters.stale_results,
        no_blocks=counters.no_blocks,
        prefix_cache_queries=counters.prefix_cache_queries,
        prefix_cache_hits=counters.prefix_cache_hits,
        ledger_backlog=ledger_backlog,
        batching=scheduler.config.batching,
        policy=scheduler.ordering.policy.name,
        queue_paused=scheduler.paused,
        wait_reasons=scheduler.wait_reasons(),
        recomputed_tokens=counters.recomputed_tokens,
        queued_tokens=scheduler.num_queued_tokens,
        overload_stage=scheduler.overload_stage,
        overload_reason=scheduler.overload_why,
        overload_changes=counters.overload_changes,
        lanes=metrics.lane_loads(running, loop.clock()),
        time_to_first_token=metrics.time_to_first_token.total(),
        inter_token_latency=metrics.inter_token.total(),
        request_queue_time=metrics.queue_time.total(),
        batch_occupancy_sum=counters.occupancy_sum,
        streams_open=loop.live.num_readers,
        finished={str(reason): count for reason, count in metrics.finished.items()},
    )


def executor_statuses(loop: Loop) -> tuple[ExecutorStatus, ...]:
    """In the order they first joined, lost ones among them."""
    return tuple(loop.drives[view.name].status(view.running, view.drained, monotonic()) for view in loop.scheduler.executors())


def connected_executors(loop: Loop) -> dict[tuple[str, int], ExecutorDescription]:
    """By name and epoch: what the executors that are there can hold of what is planned for here."""
    return {
        (drive.name, drive.epoch): replace(drive.facts.description, max_num_seqs=loop.scheduler.max_num_seqs(drive.name))
        for drive in loop.drives.values()
        if drive.connected
    }
