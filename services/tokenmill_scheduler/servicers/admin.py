"""`tokenmill.admin.v1.AdminService`: what operators call, over a desk. Must not know: the core's rules, SQL."""

# ruff: noqa: N802 (methods are named by the protocol)
from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tokenmill.admin.v1 import admin_pb2 as pb
from tokenmill.admin.v1.admin_pb2_grpc import AdminServiceServicer

from tokenmill_scheduler.core.request import TERMINAL, State
from tokenmill_scheduler.desk import Desk, RequestStatus, UnknownRequest
from tokenmill_scheduler.intake import InvalidArgument, Violations
from tokenmill_scheduler.intake.fields import TENANT_WORDS, check_priority, is_tenant, read_reason, read_request_id
from tokenmill_scheduler.ledger.port import RequestPage, RequestQuery
from tokenmill_scheduler.servicers import convert

DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE = 100, 1_000
MAX_CANCELLED_IDS = 1_000
# One answer has a line for each request; this many stay well under gRPC's default limit of 4 MiB a message.
MAX_CANCELLED_MATCHES = 20_000
# Cancels wait for a commit each; these share one.
_CONCURRENT_CANCELS = 256
# The last second that a Timestamp can say.
_YEAR_9999_S = 253_402_300_799
_LIVE = tuple(state for state in State if state not in TERMINAL)


class AdminServicer(AdminServiceServicer):
    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    async def ListRequests(self, request: pb.ListRequestsRequest, context: Any) -> pb.ListRequestsResponse:
        violations = Violations()
        query = replace(
            _read_filter(request.filter, violations),
            oldest_first=request.oldest_first,
            limit=request.page_size or DEFAULT_PAGE_SIZE,
            page_token=request.page_token,
        )
        violations.require(1 <= query.limit <= MAX_PAGE_SIZE, "page_size", f"must be from 1 to {MAX_PAGE_SIZE}")
        violations.raise_any()
        page = await self._page(query)
        infos = [convert.request_info(RequestStatus(stored, self._desk.wait_reason(stored))) for stored in page.requests]
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
        status = await self._desk.update(read_request_id(request.request_id), priority, deadline_s)
        return pb.UpdateRequestResponse(request=convert.request_info(status))

    async def ListExecutors(self, request: pb.ListExecutorsRequest, context: Any) -> pb.ListExecutorsResponse:
        return pb.ListExecutorsResponse(executors=[convert.executor(executor) for executor in self._desk.executors()])

    async def GetLoad(self, request: pb.GetLoadRequest, context: Any) -> pb.GetLoadResponse:
        return convert.load(self._desk.load())

    async def _page(self, query: RequestQuery) -> RequestPage:
        try:
            return await self._desk.query(query)
        except ValueError as error:
            raise InvalidArgument.of("page_token", "is not one that an earlier page gave") from error

    async def _matches(self, filter_: pb.RequestFilter) -> list[str]:
        """Ids of all requests the filter names, oldest first; of those that have not ended unless it names states itself."""
        violations = Violations()
        query = _read_filter(filter_, violations)
        if not filter_.ListFields():
            violations.add("filter", "must have at least one condition when no request_ids are given")
        violations.raise_any()
        query = replace(query, states=query.states or _LIVE, oldest_first=True, limit=MAX_PAGE_SIZE)
        matches: list[str] = []
        while True:
            page = await self._page(query)
            matches += [stored.request.request_id for stored in page.requests]
            if len(matches) > MAX_CANCELLED_MATCHES:
                raise InvalidArgument.of("filter", f"names more than {MAX_CANCELLED_MATCHES} requests; nothing was cancelled")
            if not page.next_page_token:
                return matches
            query = replace(query, page_token=page.next_page_token)

    async def _preview(self, request_id: str) -> pb.CancelRequestsResponse.Outcome:
        try:
            state = (await self._desk.status(read_request_id(request_id))).stored.state
        except (UnknownRequest, InvalidArgument):
            return pb.CancelRequestsResponse.Outcome(request_id=request_id, not_found=True)
        return pb.CancelRequestsResponse.Outcome(
            request_id=request_id, state=convert.STATES[state], already_ended=state in TERMINAL
        )

    async def _cancel(self, request_id: str, reason: str) -> pb.CancelRequestsResponse.Outcome:
        try:
            done = await self._desk.cancel(read_request_id(request_id), reason)
        except (UnknownRequest, InvalidArgument):
            return pb.CancelRequestsResponse.Outcome(request_id=request_id, not_found=True)
        return pb.CancelRequestsResponse.Outcome(
            request_id=request_id, state=convert.STATES[done.state], already_ended=done.already_ended
        )


def _read_filter(filter_: pb.RequestFilter, violations: Violations) -> RequestQuery:
    states = []
    for index, number in enumerate(filter_.states):
        state = convert.state_of(number)
        if state is None:
            violations.add(f"filter.states[{index}]", "must be one of the states of RequestState")
        else:
            states.append(state)
    violations.require(not filter_.tenant or is_tenant(filter_.tenant), "filter.tenant", TENANT_WORDS)
    violations.require("\0" not in filter_.model, "filter.model", "must be the name of a model")
    return RequestQuery(
        states=tuple(dict.fromkeys(states)),
        tenant=filter_.tenant,
        model=filter_.model,
        min_priority=filter_.min_priority if filter_.HasField("min_priority") else None,
        max_priority=filter_.max_priority if filter_.HasField("max_priority") else None,
    )


def _read_ids(request_ids: Sequence[str]) -> list[str]:
    if len(request_ids) > MAX_CANCELLED_IDS:
        raise InvalidArgument.of("request_ids", f"must be at most {MAX_CANCELLED_IDS}; got {len(request_ids)}")
    return list(dict.fromkeys(request_ids))
