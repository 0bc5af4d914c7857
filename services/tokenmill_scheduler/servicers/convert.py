"""Records of the scheduler ↔ messages of the inference and admin protocols. No decisions, no I/O."""

from __future__ import annotations

from collections.abc import Iterable

from google.protobuf.timestamp_pb2 import Timestamp
from tokenmill.admin.v1 import admin_pb2
from tokenmill.inference.v1 import inference_pb2, types_pb2
from tokenmill_service.histogram import Histogram

from tokenmill_scheduler.core.plans import TokenLogprobs
from tokenmill_scheduler.core.request import FinishReason, Lane, State
from tokenmill_scheduler.desk.records import ExecutorStatus, LaneLoad, Load, RequestStatus, ServedModel
from tokenmill_scheduler.ledger.records import Action, StoredTransition
from tokenmill_scheduler.ordering_choice import OrderingChoice

STATES: dict[State, types_pb2.RequestState.ValueType] = {
    State.WAITING: types_pb2.REQUEST_STATE_WAITING,
    State.PREFILL: types_pb2.REQUEST_STATE_PREFILL,
    State.DECODE: types_pb2.REQUEST_STATE_DECODE,
    State.PREEMPTED: types_pb2.REQUEST_STATE_PREEMPTED,
    State.DONE: types_pb2.REQUEST_STATE_DONE,
    State.CANCELLED: types_pb2.REQUEST_STATE_CANCELLED,
    State.EXPIRED: types_pb2.REQUEST_STATE_EXPIRED,
    State.FAILED: types_pb2.REQUEST_STATE_FAILED,
}
FINISH_REASONS: dict[FinishReason, types_pb2.FinishReason.ValueType] = {
    FinishReason.STOP: types_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: types_pb2.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: types_pb2.FINISH_REASON_CANCELLED,
    FinishReason.EXPIRED: types_pb2.FINISH_REASON_EXPIRED,
    FinishReason.ERROR: types_pb2.FINISH_REASON_ERROR,
}
_LANES: dict[Lane, types_pb2.Lane.ValueType] = {
    Lane.REAL_TIME: types_pb2.LANE_REAL_TIME,
    Lane.STANDARD: types_pb2.LANE_STANDARD,
    Lane.BATCH: types_pb2.LANE_BATCH,
}
_STATES_BACK: dict[int, State] = {number: state for state, number in STATES.items()}


def state_of(number: int) -> State | None:
    """None for UNSPECIFIED and for numbers of a newer protocol."""
    return _STATES_BACK.get(number)


def timestamp(seconds: float) -> Timestamp:
    """Unix seconds."""
    whole, nanos = divmod(round(seconds * 1e9), 1_000_000_000)
    return Timestamp(seconds=whole, nanos=nanos)


def seconds_of(stamp: Timestamp) -> float:
    return stamp.seconds + stamp.nanos / 1e9


def request_info(status: RequestStatus) -> types_pb2.RequestInfo:
    stored = status.stored
    request = stored.request
    return types_pb2.RequestInfo(
        request_id=request.request_id,
        model=request.model,
        tenant=request.tenant,
        state=STATES[stored.state],
        finish_reason=types_pb2.FINISH_REASON_UNSPECIFIED if stored.finish_reason is None else FINISH_REASONS[stored.finish_reason],
        error=stored.error,
        priority=request.priority,
        usage=types_pb2.TokenCounts(
            prompt_tokens=len(request.prompt), output_tokens=stored.num_output_tokens, cached_tokens=stored.cached_tokens
        ),
        submitted_at=timestamp(request.arrival_s),
        first_token_at=_optional_timestamp(stored.first_token_s),
        finished_at=_optional_timestamp(stored.finished_s),
        deadline=_optional_timestamp(request.deadline_s),
        preemptions=stored.preemptions,
        detached=request.detached,
        wait_reason=status.wait_reason,
        wait_code=status.wait_code,
        executor=stored.executor,
        lane=_LANES[request.lane],
        retry_of=request.retry_of,
        n=request.n,
        choice=request.choice,
        parent_id=request.parent,
    )


def transition(stored: StoredTransition) -> admin_pb2.Transition:
    return admin_pb2.Transition(
        from_state=types_pb2.REQUEST_STATE_UNSPECIFIED if stored.before is None else STATES[stored.before],
        to_state=STATES[stored.after],
        at=timestamp(stored.at_s),
        reason=stored.reason,
    )


def add_logprobs(delta: types_pb2.StreamEvent.Delta, logprobs: Iterable[TokenLogprobs]) -> None:
    for entry in logprobs:
        added = delta.logprobs.add(logprob=entry.logprob)
        for token_id, logprob in entry.top:
            added.top.add(token_id=token_id, logprob=logprob)


def model(served: ServedModel) -> inference_pb2.Model:
    return inference_pb2.Model(
        name=served.name,
        max_model_len=served.max_model_len,
        vocab_size=served.vocab_size,
        tokenizer_digest=served.tokenizer_digest,
        has_chat_template=served.text.has_chat_template,
        executors=served.executors,
    )


def executor(status: ExecutorStatus) -> admin_pb2.Executor:
    return admin_pb2.Executor(
        name=status.name,
        address=status.address,
        model=status.model,
        connected=status.connected,
        epoch=status.epoch,
        device=status.device,
        block_size=status.block_size,
        total_blocks=status.blocks.total,
        free_blocks=status.blocks.free,
        held_blocks=status.blocks.held,
        cached_blocks=status.blocks.cached,
        running=status.running,
        steps=status.steps,
        idle_share=status.idle_share,
        joined_at=_optional_timestamp(status.joined_s),
        draining=status.draining,
        scheduler=status.scheduler,
    )


def action(done: Action) -> admin_pb2.Action:
    return admin_pb2.Action(
        at=timestamp(done.at_s),
        actor=done.actor,
        verb=done.verb.value,
        target=done.target,
        reason=done.reason,
        detail=done.detail,
    )


def policy(choice: OrderingChoice) -> admin_pb2.Policy:
    real_time, standard, batch = choice.lane_shares
    shares = admin_pb2.LaneShares(real_time=real_time, standard=standard, batch=batch)
    return admin_pb2.Policy(policy=choice.policy, fair_share=choice.fair_share, lane_shares=shares)


def load(gauges: Load) -> admin_pb2.GetLoadResponse:
    return admin_pb2.GetLoadResponse(
        num_requests_running=gauges.num_requests_running,
        num_requests_waiting=gauges.num_requests_waiting,
        max_num_seqs=gauges.max_num_seqs,
        max_num_batched_tokens=gauges.max_num_batched_tokens,
        kv_cache_usage=gauges.kv_cache_usage,
        batch_occupancy=gauges.batch_occupancy,
        preemptions=gauges.preemptions,
        output_tokens=gauges.output_tokens,
        prompt_tokens=gauges.prompt_tokens,
        steps=gauges.steps,
        stale_results=gauges.stale_results,
        no_blocks=gauges.no_blocks,
        prefix_cache_queries=gauges.prefix_cache_queries,
        prefix_cache_hits=gauges.prefix_cache_hits,
        ledger_backlog=gauges.ledger_backlog,
        batching=gauges.batching,
        policy=gauges.policy,
        queue_paused=bool(gauges.queue_paused),
        queue_pause_reason=gauges.queue_paused,
        overload_stage=gauges.overload_stage,
        overload_reason=gauges.overload_reason,
        recomputed_tokens=gauges.recomputed_tokens,
        overload_changes=gauges.overload_changes,
        queued_tokens=gauges.queued_tokens,
        lanes=map(_lane_load, gauges.lanes),
        time_to_first_token=_latency(gauges.time_to_first_token),
        inter_token_latency=_latency(gauges.inter_token_latency),
        request_queue_time=_latency(gauges.request_queue_time),
        batch_occupancy_sum=gauges.batch_occupancy_sum,
        wait_reasons=gauges.wait_reasons,
        streams_open=gauges.streams_open,
        finished=gauges.finished,
    )


def _lane_load(load: LaneLoad) -> admin_pb2.LaneLoad:
    message = admin_pb2.LaneLoad(lane=_LANES[load.lane], running=load.running, waiting=load.waiting)
    message.oldest_wait.FromMilliseconds(round(load.oldest_wait_s * 1000))
    return message


def _latency(histogram: Histogram | None) -> admin_pb2.LatencyHistogram | None:
    if histogram is None:
        return None
    return admin_pb2.LatencyHistogram(bounds=histogram.bounds, counts=histogram.counts, sum=histogram.total)


def _optional_timestamp(seconds: float | None) -> Timestamp | None:
    return None if seconds is None else timestamp(seconds)
