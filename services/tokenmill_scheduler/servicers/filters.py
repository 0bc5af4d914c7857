"""What an operator asks to see, as the ledger is asked for it. Must not know: the desk, what becomes of the answer."""

from __future__ import annotations

from tokenmill.admin.v1 import admin_pb2 as pb

from tokenmill_scheduler.core.request import Lane, State
from tokenmill_scheduler.intake import Violations
from tokenmill_scheduler.intake.fields import LANE_WORDS, TENANT_WORDS, is_lane, is_tenant
from tokenmill_scheduler.ledger.records import RequestQuery
from tokenmill_scheduler.servicers import convert

DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE = 100, 1_000


def read_filter(filter_: pb.RequestFilter, now_s: float, violations: Violations) -> RequestQuery:
    """`now_s`, in Unix seconds, is what ages count back from."""
    violations.require(not filter_.tenant or is_tenant(filter_.tenant), "filter.tenant", TENANT_WORDS)
    violations.require("\0" not in filter_.model, "filter.model", "must be the name of a model")
    min_age_s = filter_.min_age.seconds + filter_.min_age.nanos / 1e9
    violations.require(min_age_s >= 0, "filter.min_age", "must not be below 0")
    return RequestQuery(
        states=_read_states(filter_, violations),
        tenant=filter_.tenant,
        model=filter_.model,
        lanes=_read_lanes(filter_, violations),
        min_priority=filter_.min_priority if filter_.HasField("min_priority") else None,
        max_priority=filter_.max_priority if filter_.HasField("max_priority") else None,
        arrived_before_s=now_s - min_age_s if filter_.HasField("min_age") else None,
    )


def read_page_size(page_size: int, violations: Violations) -> int:
    limit = page_size or DEFAULT_PAGE_SIZE
    violations.require(1 <= limit <= MAX_PAGE_SIZE, "page_size", f"must be from 1 to {MAX_PAGE_SIZE}")
    return limit


def _read_states(filter_: pb.RequestFilter, violations: Violations) -> tuple[State, ...]:
    states = []
    for index, number in enumerate(filter_.states):
        state = convert.state_of(number)
        if state is None:
            violations.add(f"filter.states[{index}]", "must be one of the states of RequestState")
        else:
            states.append(state)
    return tuple(dict.fromkeys(states))


def _read_lanes(filter_: pb.RequestFilter, violations: Violations) -> tuple[Lane, ...]:
    """Unspecified names the standard lane, as in a request."""
    for index, number in enumerate(filter_.lanes):
        violations.require(not number or is_lane(number), f"filter.lanes[{index}]", LANE_WORDS)
    return tuple(dict.fromkeys(Lane(number or Lane.STANDARD) for number in filter_.lanes if not number or is_lane(number)))
