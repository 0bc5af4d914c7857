"""Cancels many requests at an operator's word: those that are named, or all that a filter matches.

Must not know: who may do it, how one request is cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from tokenmill.admin.v1 import admin_pb2 as pb

from tokenmill_scheduler.core.choices import choice_ids
from tokenmill_scheduler.core.request import TERMINAL, State
from tokenmill_scheduler.desk.errors import UnknownRequest
from tokenmill_scheduler.desk.port import Desk
from tokenmill_scheduler.intake import InvalidArgument, Violations
from tokenmill_scheduler.intake.fields import read_reason, read_request_id
from tokenmill_scheduler.servicers import convert
from tokenmill_scheduler.servicers.filters import MAX_PAGE_SIZE, read_filter

MAX_CANCELLED_IDS = 1_000
# One answer has a line for each request; this many stay well under gRPC's default limit of 4 MiB a message.
MAX_CANCELLED_MATCHES = 20_000
# Cancels wait for a commit each; these share one.
_CONCURRENT_CANCELS = 256
_LIVE = tuple(state for state in State if state not in TERMINAL)


class BulkCancel:
    def __init__(self, desk: Desk, clock: Callable[[], float]) -> None:
        """`clock` gives Unix seconds, for ages."""
        self._desk = desk
        self._clock = clock

    async def carry_out(self, request: pb.CancelRequestsRequest, actor: str) -> pb.CancelRequestsResponse:
        """One outcome a request, in order. Raises InvalidArgument, with nothing cancelled."""
        reason = read_reason(request.reason, "cancelled by an operator")
        request_ids = _read_ids(request.request_ids) if request.request_ids else await self._matches(request.filter)
        response = pb.CancelRequestsResponse()
        for start in range(0, len(request_ids), _CONCURRENT_CANCELS):
            batch = request_ids[start : start + _CONCURRENT_CANCELS]
            outcomes = [self._preview(one) if request.dry_run else self._cancel(one, reason, actor) for one in batch]
            response.outcomes.extend(await asyncio.gather(*outcomes))
        return response

    async def _matches(self, filter_: pb.RequestFilter) -> list[str]:
        """Ids of all requests the filter names, oldest first; of those that have not ended unless it names states itself.

        Where it names the first choice of a request, that stands for all of them.
        """
        violations = Violations()
        query = read_filter(filter_, self._clock(), violations)
        if not filter_.ListFields():
            violations.add("filter", "must have at least one condition when no request_ids are given")
        violations.raise_any()
        query = replace(query, states=query.states or _LIVE, oldest_first=True, limit=MAX_PAGE_SIZE)
        matches: dict[str, None] = {}
        while True:
            page = await self._desk.query(query)
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

    async def _cancel(self, request_id: str, reason: str, actor: str) -> pb.CancelRequestsResponse.Outcome:
        try:
            done = await self._desk.cancel(read_request_id(request_id), reason, actor)
        except (UnknownRequest, InvalidArgument):
            return pb.CancelRequestsResponse.Outcome(request_id=request_id, not_found=True)
        return pb.CancelRequestsResponse.Outcome(
            request_id=request_id, state=convert.STATES[done.state], already_ended=done.already_ended
        )


def _read_ids(request_ids: Sequence[str]) -> list[str]:
    if len(request_ids) > MAX_CANCELLED_IDS:
        raise InvalidArgument.of("request_ids", f"must be at most {MAX_CANCELLED_IDS}; got {len(request_ids)}")
    return list(dict.fromkeys(request_ids))
