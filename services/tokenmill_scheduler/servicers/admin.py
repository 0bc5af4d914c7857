"""`tokenmill.admin.v1.AdminService`: what operators call, over the desks. Must not know: the core's rules, SQL."""

# ruff: noqa: N802 (methods are named by the protocol)
from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tokenmill.admin.v1 import admin_pb2 as pb
from tokenmill.admin.v1.admin_pb2_grpc import AdminServiceServicer

from tokenmill_scheduler.core.choices import choice_ids
from tokenmill_scheduler.core.policy import POLICIES
from tokenmill_scheduler.core.request import TERMINAL, Lane, State
from tokenmill_scheduler.desk.errors import UnknownRequest
from tokenmill_scheduler.desk.port import Desk, OperatorDesk
from tokenmill_scheduler.intake import InvalidArgument, Violations
from tokenmill_scheduler.intake.fields import (
    LANE_WORDS,
    TENANT_WORDS,
    check_priority,
    is_lane,
    is_tenant,
    read_reason,
    read_request_id,
)
from tokenmill_scheduler.intake.request import draw_request_id
from tokenmill_scheduler.ledger.records import ActionQuery, RequestPage, RequestQuery
from tokenmill_scheduler.ordering_choice import OrderingChoice
from tokenmill_scheduler.servicers import convert
from tokenmill_scheduler.servicers.auth import current_identity

DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE = 100, 1_000
MAX_CANCELLED_IDS = 1_000
# One answer has a line for each request; this many stay well under gRPC's default limit of 4 MiB a message.
MAX_CANCELLED_MATCHES = 20_000
# Cancels wait for a commit each; these share one.
_CONCURRENT_CANCELS = 256
# The last second that a Timestamp can say.
_YEAR_9999_S = 253_402_300_799
_PAGE_TOKEN_WORDS = "is not one that an earlier page gave"
_LIVE = tuple(state for state in State if state not in TERMINAL)


class AdminServicer(AdminServiceServicer):
    def __init__(
        self,
        desk: Desk,
        operators: OperatorDesk,
        clock: Callable[[], float] = time.time,
        randbits: Callable[[int], int] = secrets.randbits,
    ) -> None:
        """`clock` gives Unix seconds, for ages and ids; `randbits(n)` draws n random bits, for ids."""
        self._desk = desk
        self._operators = operators
        self._clock = clock
        self._randbits = randbits

    async def ListRequests(self, request: pb.ListRequestsRequest, context: Any) -> pb.ListRequestsResponse:
        violations = Violations()
        query = replace(
            self._read_filter(request.filter, violations),
            oldest_first=request.oldest_first,
            by_priority=request.by_priority,
            limit=_read_page_size(request.page_size, violations),
            page_token=request.page_token,
        )
        violations.raise_any()
        page = await self._page(query)
        infos = [convert.request_info(self._desk.standing(stored)) for stored in page.requests]
        return pb.ListRequestsResponse(requests=infos, next_page_token=page.next_page_token)

    async def GetRequest(self, request: pb.GetRequestRequest, context: Any) -> pb.GetRequestResponse:
        status = await self._desk.status(read_request_id(request.request_id))
        transitions = await self._desk.transitions(request.request_id)
        return pb.GetRequestResponse(
            request=convert.request_info(status), transitions=[convert.transition(transition) for transition in transitions]
        )

    async def CancelRequests(self, request: pb.CancelRequestsRequest, context: Any) -> pb.CancelRequestsResponse:
        reason = read_reason(request.reason, "cancelled by an operator")
        request_ids = _read_ids(request.request_ids) if request.request_ids else await self._matches(request.filter)
        response = pb.CancelRequestsResponse()
        for start in range(0, len(request_ids), _CONCURRENT_CANCELS):
            batch = request_ids[start : start + _CONCURRENT_CANCELS]
            outcomes = [self._preview(request_id) if request.dry_run else self._cancel(request_id, reason) for request_id in batch]
            response.outcomes.extend(await asyncio.gather(*outcomes))
        return response

    async def UpdateRequest(self, request: pb.UpdateRequestRequest, context: Any) -> pb.UpdateRequestResponse:
        violations = Violations()
        priority = request.priority if request.HasField("priority") else None
        deadline_s = convert.seconds_of(request.deadline) if request.HasField("deadline") else None
        if priority is not None:
            check_priority(priority, "priority", violations)
        if deadline_s is not None:
            violations.require(0 < deadline_s <= _YEAR_9999_S, "deadline", "must be a time after 1970 and before the year 10000")
        if priority is None and deadline_s is None:
            violations.add("priority", "at least one of priority and deadline must be given")
        violations.raise_any()
        request_id, reason = read_request_id(request.request_id), read_reason(request.reason)
        status = await self._desk.update(request_id, priority, deadline_s, reason, _actor())
        return pb.UpdateRequestResponse(request=convert.request_info(status))

    async def ListExecutors(self, request: pb.ListExecutorsRequest, context: Any) -> pb.ListExecutorsResponse:
        return pb.ListExecutorsResponse(executors=[convert.executor(executor) for executor in self._desk.executors()])

    async def GetLoad(self, request: pb.GetLoadRequest, context: Any) -> pb.GetLoadResponse:
        return convert.load(self._desk.load())

    async def PauseQueue(self, request: pb.PauseQueueRequest, context: Any) -> pb.PauseQueueResponse:
        changed = await self._operators.pause_queue(_actor(), read_reason(request.reason))
        return pb.PauseQueueResponse(unchanged=not changed)

    async def ResumeQueue(self, request: pb.ResumeQueueRequest, context: Any) -> pb.ResumeQueueResponse:
        changed = await self._operators.resume_queue(_actor(), read_reason(request.reason))
        return pb.ResumeQueueResponse(unchanged=not changed)

    async def RetryRequest(self, request: pb.RetryRequestRequest, context: Any) -> pb.RetryRequestResponse:
        new_id = draw_request_id(self._clock(), self._randbits)
        await self._desk.retry(read_request_id(request.request_id), new_id, read_reason(request.reason), _actor())
        return pb.RetryRequestResponse(request_id=new_id)

    async def DrainExecutor(self, request: pb.DrainExecutorRequest, context: Any) -> pb.DrainExecutorResponse:
        status = await self._operators.drain_executor(request.name, _actor(), read_reason(request.reason))
        return pb.DrainExecutorResponse(executor=convert.executor(status))

    async def UndrainExecutor(self, request: pb.UndrainExecutorRequest, context: Any) -> pb.UndrainExecutorResponse:
        status = await self._operators.undrain_executor(request.name, _actor(), read_reason(request.reason))
        return pb.UndrainExecutorResponse(executor=convert.executor(status))

    async def GetPolicy(self, request: pb.GetPolicyRequest, context: Any) -> pb.GetPolicyResponse:
        status = self._operators.policy()
        return pb.GetPolicyResponse(policy=convert.policy(status.choice), reason=status.why)

    async def SetPolicy(self, request: pb.SetPolicyRequest, context: Any) -> pb.SetPolicyResponse:
        choice, reason = _read_choice(request, self._operators.policy().choice), read_reason(request.reason)
        changed = await self._operators.set_policy(choice, _actor(), reason)
        return pb.SetPolicyResponse(policy=convert.policy(choice), unchanged=not changed)

    async def ResetPolicy(self, request: pb.ResetPolicyRequest, context: Any) -> pb.ResetPolicyResponse:
        changed = await self._operators.reset_policy(_actor(), read_reason(request.reason))
        return pb.ResetPolicyResponse(policy=convert.policy(self._operators.policy().choice), unchanged=not changed)

    async def ListActions(self, request: pb.ListActionsRequest, context: Any) -> pb.ListActionsResponse:
        violations = Violations()
        limit = _read_page_size(request.page_size, violations)
        violations.require("\0" not in request.target, "target", "must be a request id or an executor's name")
        violations.raise_any()
        try:
            page = await self._operators.actions(ActionQuery(request.target, limit, request.page_token))
        except ValueError as error:
            raise InvalidArgument.of("page_token", _PAGE_TOKEN_WORDS) from error
        return pb.ListActionsResponse(actions=map(convert.action, page.actions), next_page_token=page.next_page_token)

    def _read_filter(self, filter_: pb.RequestFilter, violations: Violations) -> RequestQuery:
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
            arrived_before_s=self._clock() - min_age_s if filter_.HasField("min_age") else None,
        )

    async def _page(self, query: RequestQuery) -> RequestPage:
        try:
            return await self._desk.query(query)
        except ValueError as error:
            raise InvalidArgument.of("page_token", _PAGE_TOKEN_WORDS) from error

    async def _matches(self, filter_: pb.RequestFilter) -> list[str]:
        """Ids of all requests the filter names, oldest first; of those that have not ended unless it names states itself.

        Where it names the first choice of a request, that stands for all of them.
        """
        violations = Violations()
        query = self._read_filter(filter_, violations)
        if not filter_.ListFields():
            violations.add("filter", "must have at least one condition when no request_ids are given")
        violations.raise_any()
        query = replace(query, states=query.states or _LIVE, oldest_first=True, limit=MAX_PAGE_SIZE)
        matches: dict[str, None] = {}
        while True:
            page = await self._page(query)
            for stored in page.requests:
                # The first choice comes before the others.
                if stored.request.parent not in matches:
                    matches[stored.request.request_id] = None
            if len(matches) > MAX_CANCELLED_MATCHES:
                raise InvalidArgument.of("filter", f"names more than {MAX_CANCELLED_MATCHES} requests; nothing was cancelled")
            if not page.next_page_token:
                return list(matches)
            query = replace(query, page_token=page.next_page_token)

    async def _preview(self, request_id: str) -> pb.CancelRequestsResponse.Outcome:
        try:
            first = (await self._desk.status(read_request_id(request_id))).stored
            others = [(await self._desk.status(choice)).stored for choice in choice_ids(first.request)[1:]]
        except (UnknownRequest, InvalidArgument):
            return pb.CancelRequestsResponse.Outcome(request_id=request_id, not_found=True)
        # That of a choice to be cancelled, if there is one.
        state = next((choice.state for choice in (first, *others) if choice.state not in TERMINAL), first.state)
        return pb.CancelRequestsResponse.Outcome(
            request_id=request_id, state=convert.STATES[state], already_ended=state in TERMINAL
        )

    async def _cancel(self, request_id: str, reason: str) -> pb.CancelRequestsResponse.Outcome:
        try:
            done = await self._desk.cancel(read_request_id(request_id), reason, _actor())
        except (UnknownRequest, InvalidArgument):
            return pb.CancelRequestsResponse.Outcome(request_id=request_id, not_found=True)
        return pb.CancelRequestsResponse.Outcome(
            request_id=request_id, state=convert.STATES[done.state], already_ended=done.already_ended
        )


def _actor() -> str:
    return current_identity().actor


def _read_page_size(page_size: int, violations: Violations) -> int:
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


def _read_choice(request: pb.SetPolicyRequest, before: OrderingChoice) -> OrderingChoice:
    violations = Violations()
    violations.require(request.policy in ("", *POLICIES), "policy", f"must be one of {', '.join(POLICIES)}; got {request.policy!r}")
    shares = before.lane_shares
    if request.HasField("lane_shares"):
        shares = (request.lane_shares.real_time, request.lane_shares.standard, request.lane_shares.batch)
        violations.require(sum(shares) <= 100, "lane_shares", "must come to 100 per cent at most")
    violations.raise_any()
    fair_share = request.fair_share if request.HasField("fair_share") else before.fair_share
    return OrderingChoice(request.policy or before.policy, fair_share, shares)


def _read_ids(request_ids: Sequence[str]) -> list[str]:
    if len(request_ids) > MAX_CANCELLED_IDS:
        raise InvalidArgument.of("request_ids", f"must be at most {MAX_CANCELLED_IDS}; got {len(request_ids)}")
    return list(dict.fromkeys(request_ids))
