"""Arguments and records to the messages of operators' calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from google.protobuf.timestamp_pb2 import Timestamp
from tokenmill.admin.v1 import admin_pb2
from tokenmill.inference.v1 import types_pb2

from tokenmill_client.admin_records import RequestFilter
from tokenmill_client.records import Lane, RequestState, named
from tokenmill_client.wire.fields import Field, lane_number


def list_requests(
    condition: RequestFilter | None, page_size: int, page_token: str, oldest_first: bool, by_priority: bool
) -> admin_pb2.ListRequestsRequest:
    return admin_pb2.ListRequestsRequest(
        filter=_request_filter(condition),
        page_size=page_size,
        page_token=page_token,
        oldest_first=oldest_first,
        by_priority=by_priority,
    )


def get_request_life(request_id: str) -> admin_pb2.GetRequestRequest:
    return admin_pb2.GetRequestRequest(request_id=request_id)


def cancel_requests(
    request_ids: Sequence[str], condition: RequestFilter | None, reason: str, dry_run: bool
) -> admin_pb2.CancelRequestsRequest:
    return admin_pb2.CancelRequestsRequest(
        request_ids=request_ids, filter=_request_filter(condition), reason=reason, dry_run=dry_run
    )


def update_request(request_id: str, priority: int | None, deadline: datetime | None, reason: str) -> admin_pb2.UpdateRequestRequest:
    return admin_pb2.UpdateRequestRequest(
        request_id=request_id, priority=priority, deadline=None if deadline is None else _timestamp(deadline), reason=reason
    )


def retry_request(request_id: str, reason: str) -> admin_pb2.RetryRequestRequest:
    return admin_pb2.RetryRequestRequest(request_id=request_id, reason=reason)


def pause_queue(reason: str) -> admin_pb2.PauseQueueRequest:
    return admin_pb2.PauseQueueRequest(reason=reason)


def get_policy() -> admin_pb2.GetPolicyRequest:
    return admin_pb2.GetPolicyRequest()


def set_policy(
    policy: str | None, fair_share: bool | None, lane_shares: Mapping[Lane | str, int] | None, reason: str
) -> admin_pb2.SetPolicyRequest:
    request = admin_pb2.SetPolicyRequest(policy=policy or "", reason=reason)
    if fair_share is not None:
        request.fair_share = fair_share
    with Field("lane_shares"):
        for lane, share in (lane_shares or {}).items():
            setattr(request.lane_shares, named(Lane, lane).value, share)
    return request


def reset_policy(reason: str) -> admin_pb2.ResetPolicyRequest:
    return admin_pb2.ResetPolicyRequest(reason=reason)


def resume_queue(reason: str) -> admin_pb2.ResumeQueueRequest:
    return admin_pb2.ResumeQueueRequest(reason=reason)


def drain_executor(name: str, reason: str) -> admin_pb2.DrainExecutorRequest:
    return admin_pb2.DrainExecutorRequest(name=name, reason=reason)


def undrain_executor(name: str, reason: str) -> admin_pb2.UndrainExecutorRequest:
    return admin_pb2.UndrainExecutorRequest(name=name, reason=reason)


def list_actions(target: str, page_size: int, page_token: str) -> admin_pb2.ListActionsRequest:
    return admin_pb2.ListActionsRequest(target=target, page_size=page_size, page_token=page_token)


def list_executors() -> admin_pb2.ListExecutorsRequest:
    return admin_pb2.ListExecutorsRequest()


def get_load() -> admin_pb2.GetLoadRequest:
    return admin_pb2.GetLoadRequest()


def _request_filter(condition: RequestFilter | None) -> admin_pb2.RequestFilter | None:
    if condition is None:
        return None
    message = admin_pb2.RequestFilter(
        tenant=condition.tenant,
        min_priority=condition.min_priority,
        max_priority=condition.max_priority,
        model=condition.model,
    )
    with Field("states"):
        message.states.extend([_state(state) for state in condition.states])
    with Field("lanes"):
        message.lanes.extend([lane_number(lane) for lane in condition.lanes])
    if condition.min_age is not None:
        message.min_age.FromNanoseconds(round(condition.min_age * 1e9))
    return message


def _timestamp(at: datetime) -> Timestamp:
    """A time without a zone is taken as local time."""
    message = Timestamp()
    message.FromDatetime(at.astimezone(UTC))
    return message


def _state(state: RequestState | str) -> types_pb2.RequestState.ValueType:
    return types_pb2.RequestState.Value(f"REQUEST_STATE_{named(RequestState, state).name}")
