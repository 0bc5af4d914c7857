"""Messages of answers and streams to records."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar, cast

from tokenmill.admin.v1 import admin_pb2
from tokenmill.inference.v1 import inference_pb2, types_pb2

from tokenmill_client import admin_records, records
from tokenmill_client.errors import ServerError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

R = TypeVar("R", bound="DataclassInstance")


_WITH_EVENTS = (inference_pb2.GenerateResponse, inference_pb2.AttachResponse, inference_pb2.MultiplexResponse.CallEvent)


def stream_event(response: object) -> records.StreamEvent | None:
    """None for what is no response: gRPC's mark of a stream's end."""
    if not isinstance(response, _WITH_EVENTS):
        return None
    event = response.event
    match event.WhichOneof("event"):
        case "delta":
            return _delta(event.delta, event.choice)
        case "accepted":
            # An older server knows of one choice alone, and does not say so.
            return records.Accepted(event.accepted.request_id, event.accepted.prompt_tokens, event.accepted.num_choices or 1)
        case "finished":
            return _finished(event.finished, event.choice)
        case _:
            raise ServerError("The server sent a stream event that this client does not know: use a newer client.")


def _delta(delta: types_pb2.StreamEvent.Delta, choice: int) -> records.Delta:
    return records.Delta(
        first_index=delta.first_index,
        token_count=delta.token_count,
        token_ids=tuple(delta.token_ids),
        text=delta.text,
        logprobs=tuple(map(_token_logprobs, delta.logprobs)),
        choice=choice,
    )


def _token_logprobs(entry: types_pb2.TokenLogprobs) -> records.TokenLogprobs:
    return records.TokenLogprobs(entry.logprob, tuple([(top.token_id, top.logprob) for top in entry.top]))


def _finished(finished: types_pb2.StreamEvent.Finished, choice: int) -> records.Finished:
    return records.Finished(
        state=_state(finished.state),
        finish_reason=_finish_reason(finished.finish_reason),
        usage=_usage(finished.usage),
        error=finished.error,
        error_code=finished.error_code,
        choice=choice,
    )


def _state(number: types_pb2.RequestState.ValueType) -> records.RequestState:
    name = types_pb2.RequestState.Name(number) if number in types_pb2.RequestState.values() else ""
    try:
        return records.RequestState[name.removeprefix("REQUEST_STATE_")]
    except KeyError:
        raise ServerError(
            f"The server names a request state, {number}, that this client does not know: use a newer client."
        ) from None


def _lane(number: types_pb2.Lane.ValueType) -> records.Lane:
    """Standard when the server names none, or one that this client does not know."""
    if number == types_pb2.LANE_UNSPECIFIED or number not in types_pb2.Lane.values():
        return records.Lane.STANDARD
    return records.Lane[types_pb2.Lane.Name(number).removeprefix("LANE_")]


def _finish_reason(number: types_pb2.FinishReason.ValueType) -> records.FinishReason | None:
    """None while there is none; a reason that this client does not know reads as ERROR."""
    if number == types_pb2.FINISH_REASON_UNSPECIFIED:
        return None
    if number not in types_pb2.FinishReason.values():
        return records.FinishReason.ERROR
    return records.FinishReason[types_pb2.FinishReason.Name(number).removeprefix("FINISH_REASON_")]


def _usage(counts: types_pb2.TokenCounts) -> records.Usage:
    return records.Usage(counts.prompt_tokens, counts.output_tokens, counts.cached_tokens)


def _time(message: Any, field: str) -> datetime | None:
    return cast(datetime, getattr(message, field).ToDatetime(tzinfo=UTC)) if message.HasField(field) else None


def submitted(response: inference_pb2.SubmitResponse) -> records.Submitted:
    return records.Submitted(response.request_id, response.prompt_tokens, response.joined)


def cancellation(response: inference_pb2.CancelResponse) -> records.Cancellation:
    return records.Cancellation(_state(response.state), response.already_ended)


def tokenized(response: inference_pb2.TokenizeResponse) -> records.Tokenized:
    return records.Tokenized(tuple(response.token_ids), response.max_model_len)


def model(message: inference_pb2.Model) -> records.Model:
    return _record(records.Model, message)


def request_info(info: types_pb2.RequestInfo) -> records.RequestInfo:
    return _record(
        records.RequestInfo,
        info,
        state=_state(info.state),
        finish_reason=_finish_reason(info.finish_reason),
        usage=_usage(info.usage),
        lane=_lane(info.lane),
        submitted_at=_time(info, "submitted_at"),
        first_token_at=_time(info, "first_token_at"),
        finished_at=_time(info, "finished_at"),
        deadline=_time(info, "deadline"),
    )


def request_snapshot(response: inference_pb2.GetRequestResponse) -> records.RequestSnapshot:
    choices = [
        records.ChoiceSnapshot(part.choice, request_info(part.request), tuple(part.output_token_ids), part.output_text)
        for part in response.choices
    ]
    info, token_ids = request_info(response.request), tuple(response.output_token_ids)
    return records.RequestSnapshot(info, token_ids, response.output_text, tuple(choices))


def request_life(response: admin_pb2.GetRequestResponse) -> admin_records.RequestLife:
    return admin_records.RequestLife(request_info(response.request), tuple(_transition(entry) for entry in response.transitions))


def _transition(entry: admin_pb2.Transition) -> admin_records.Transition:
    first = entry.from_state == types_pb2.REQUEST_STATE_UNSPECIFIED
    before = None if first else _state(entry.from_state)
    return admin_records.Transition(before, _state(entry.to_state), entry.at.ToDatetime(tzinfo=UTC), entry.reason)


def cancel_outcome(outcome: admin_pb2.CancelRequestsResponse.Outcome) -> admin_records.CancelOutcome:
    state = None if outcome.not_found else _state(outcome.state)
    return admin_records.CancelOutcome(outcome.request_id, state, outcome.already_ended, outcome.not_found)


def executor(message: admin_pb2.Executor) -> admin_records.Executor:
    return _record(admin_records.Executor, message, joined_at=_time(message, "joined_at"))


def action(message: admin_pb2.Action) -> admin_records.Action:
    return _record(admin_records.Action, message, at=message.at.ToDatetime(tzinfo=UTC))


def policy(message: admin_pb2.Policy, reason: str = "") -> admin_records.Policy:
    shares = message.lane_shares
    lane_shares = admin_records.LaneShares(shares.real_time, shares.standard, shares.batch)
    return admin_records.Policy(message.policy, message.fair_share, lane_shares, reason)


def load(response: admin_pb2.GetLoadResponse) -> admin_records.Load:
    return _record(
        admin_records.Load,
        response,
        lanes=tuple(_lane_load(lane) for lane in response.lanes),
        time_to_first_token=_latency(response.time_to_first_token),
        inter_token_latency=_latency(response.inter_token_latency),
        request_queue_time=_latency(response.request_queue_time),
        wait_reasons=dict(response.wait_reasons),
        finished=dict(response.finished),
    )


def _lane_load(load: admin_pb2.LaneLoad) -> admin_records.LaneLoad:
    return admin_records.LaneLoad(_lane(load.lane), load.running, load.waiting, load.oldest_wait.ToTimedelta().total_seconds())


def _latency(histogram: admin_pb2.LatencyHistogram) -> admin_records.LatencyHistogram:
    return admin_records.LatencyHistogram(tuple(histogram.bounds), tuple(histogram.counts), histogram.sum)


def _record(kind: type[R], message: Any, **converted: Any) -> R:
    """A record of the message's fields of the same names, but for those given. Fields the record lacks are a newer server's."""
    names = [field.name for field in dataclasses.fields(kind)]
    return kind(**{name: converted[name] if name in converted else getattr(message, name) for name in names})
