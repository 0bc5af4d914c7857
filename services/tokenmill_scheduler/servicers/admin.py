"""`tokenmill.admin.v1.AdminService`: what operators call, over the desks. Must not know: the core's rules, SQL."""

# ruff: noqa: N802 (methods are named by the protocol)
from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tokenmill.admin.v1 import admin_pb2 as pb
from tokenmill.admin.v1.admin_pb2_grpc import AdminServiceServicer

from tokenmill_scheduler.core.lanes import LaneShares, lane_shares_in_words
from tokenmill_scheduler.core.policy import POLICIES
from tokenmill_scheduler.desk.port import Desk, OperatorDesk
from tokenmill_scheduler.intake import InvalidArgument, Violations
from tokenmill_scheduler.intake.fields import check_priority, read_reason, read_request_id
from tokenmill_scheduler.intake.request import draw_request_id
from tokenmill_scheduler.ledger.records import ActionQuery
from tokenmill_scheduler.ordering_choice import OrderingChoice
from tokenmill_scheduler.servicers import convert
from tokenmill_scheduler.servicers.auth import current_identity
from tokenmill_scheduler.servicers.bulk_cancel import BulkCancel
from tokenmill_scheduler.servicers.filters import read_filter, read_page_size

# The last second that a Timestamp can say.
_YEAR_9999_S = 253_402_300_799
_PAGE_TOKEN_WORDS = "is not one that an earlier page gave"


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
        self._bulk_cancel = BulkCancel(desk, clock)

    async def ListRequests(self, request: pb.ListRequestsRequest, context: Any) -> pb.ListRequestsResponse:
        violations = Violations()
        query = replace(
            read_filter(request.filter, self._clock(), violations),
            oldest_first=request.oldest_first,
            by_priority=request.by_priority,
            limit=read_page_size(request.page_size, violations),
            page_token=request.page_token,
        )
        violations.raise_any()
        try:
            page = await self._desk.query(query)
        except ValueError as error:
            raise InvalidArgument.of("page_token", _PAGE_TOKEN_WORDS) from error
        infos = [convert.request_info(self._desk.standing(stored)) for stored in page.requests]
        return pb.ListRequestsResponse(requests=infos, next_page_token=page.next_page_token)

    async def GetRequest(self, request: pb.GetRequestRequest, context: Any) -> pb.GetRequestResponse:
        status = await self._desk.status(read_request_id(request.request_id))
        transitions = await self._desk.transitions(request.request_id)
        return pb.GetRequestResponse(
            request=convert.request_info(status), transitions=[convert.transition(transition) for transition in transitions]
        )

    async def CancelRequests(self, request: pb.CancelRequestsRequest, context: Any) -> pb.CancelRequestsResponse:
        return await self._bulk_cancel.carry_out(request, _actor())

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
        limit = read_page_size(request.page_size, violations)
        violations.require("\0" not in request.target, "target", "must be a request id or an executor's name")
        violations.raise_any()
        try:
            page = await self._operators.actions(ActionQuery(request.target, limit, request.page_token))
        except ValueError as error:
            raise InvalidArgument.of("page_token", _PAGE_TOKEN_WORDS) from error
        return pb.ListActionsResponse(actions=map(convert.action, page.actions), next_page_token=page.next_page_token)


def _actor() -> str:
    return current_identity().actor


def _read_choice(request: pb.SetPolicyRequest, before: OrderingChoice) -> OrderingChoice:
    violations = Violations()
    violations.require(request.policy in ("", *POLICIES), "policy", f"must be one of {', '.join(POLICIES)}; got {request.policy!r}")
    shares = _read_lane_shares(request.lane_shares, before.lane_shares)
    violations.require(sum(shares) <= 100, "lane_shares", f"must come to 100 per cent at most, not {lane_shares_in_words(shares)}")
    violations.raise_any()
    fair_share = request.fair_share if request.HasField("fair_share") else before.fair_share
    return OrderingChoice(request.policy or before.policy, fair_share, shares)


def _read_lane_shares(message: pb.LaneShares, before: LaneShares) -> LaneShares:
    real_time, standard, batch = before
    return (
        message.real_time if message.HasField("real_time") else real_time,
        message.standard if message.HasField("standard") else standard,
        message.batch if message.HasField("batch") else batch,
    )
