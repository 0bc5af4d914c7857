"""Reads: rows into records. Each function works on the snapshot of the connection it is given."""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, Select, func, select, tuple_

from tokenmill_scheduler.core.records import TokenLogprobs
from tokenmill_scheduler.core.request import FinishReason, Request, State
from tokenmill_scheduler.ledger.codec import unpack_logprobs, unpack_parameters, unpack_tokens
from tokenmill_scheduler.ledger.port import (
    LedgerCorrupt,
    RequestPage,
    RequestQuery,
    StoredOutput,
    StoredRequest,
    StoredTransition,
)
from tokenmill_scheduler.ledger.tables import requests, tails, tokens, transitions

_PAGE = 256
_ARRIVAL = tuple_(requests.c.arrival_s, requests.c.number)
# An unfinished request is counted by its tail, an ended one has no tail.
_REQUESTS: Select[Any] = select(
    requests,
    func.coalesce(tails.c.first_index + tails.c["count"], requests.c.num_output_tokens).label("output_tokens"),
    func.coalesce(tails.c.first_token_s, requests.c.first_token_s).label("started_s"),
).outerjoin_from(requests, tails, tails.c.request_id == requests.c.request_id)


def find(connection: Connection, request_id: str) -> StoredRequest | None:
    row = connection.execute(_REQUESTS.where(requests.c.request_id == request_id)).first()
    return None if row is None else _stored_request(row)


def payload_digest(connection: Connection, request_id: str) -> bytes | None:
    return connection.scalar(select(requests.c.payload_digest).where(requests.c.request_id == request_id))


def output(connection: Connection, request_id: str, first_index: int) -> StoredOutput:
    return _outputs(connection, [request_id], first_index)[request_id]


def stored_transitions(connection: Connection, request_id: str) -> tuple[StoredTransition, ...]:
    columns = transitions.c
    moves = select(columns.before_state, columns.after_state, columns.at_s, columns.reason)
    rows = connection.execute(moves.where(columns.request_id == request_id).order_by(columns.number))
    return tuple(StoredTransition(before and State(before), State(after), at_s, reason) for before, after, at_s, reason in rows)


def unfinished(connection: Connection) -> Iterator[tuple[StoredRequest, StoredOutput]]:
    """In pages, so that memory holds a few hundred at a time."""
    statement = _REQUESTS.where(requests.c.finished_s.is_(None)).order_by(requests.c.arrival_s, requests.c.number).limit(_PAGE)
    page = connection.execute(statement).all()
    while page:
        found = [_stored_request(row) for row in page]
        outputs = _outputs(connection, [stored.request.request_id for stored in found])
        yield from ((stored, outputs[stored.request.request_id]) for stored in found)
        page = connection.execute(statement.where((page[-1].arrival_s, page[-1].number) < _ARRIVAL)).all()


def query(connection: Connection, query: RequestQuery) -> RequestPage:
    """One row more than asked for tells whether there is a next page."""
    statement = _REQUESTS.where(*_conditions(query)).limit(query.limit + 1)
    order = (requests.c.arrival_s, requests.c.number)
    statement = statement.order_by(*(order if query.oldest_first else (column.desc() for column in order)))
    rows = connection.execute(statement).all()
    shown = rows[: query.limit]
    more = len(rows) > query.limit
    return RequestPage(tuple(map(_stored_request, shown)), _page_token(shown[-1].arrival_s, shown[-1].number) if more else "")


def _conditions(query: RequestQuery) -> Iterator[ColumnElement[bool]]:
    if query.states:
        yield requests.c.state.in_([state.value for state in query.states])
    if query.tenant:
        yield requests.c.tenant == query.tenant
    if query.model:
        yield requests.c.model == query.model
    if query.min_priority is not None:
        yield requests.c.priority >= query.min_priority
    if query.max_priority is not None:
        yield requests.c.priority <= query.max_priority
    if query.page_token:
        last = _parse_page_token(query.page_token)
        yield last < _ARRIVAL if query.oldest_first else last > _ARRIVAL


def _page_token(arrival_s: float, number: int) -> str:
    return base64.urlsafe_b64encode(f"{arrival_s.hex()} {number}".encode()).decode()


def _parse_page_token(page_token: str) -> tuple[float, int]:
    try:
        arrival_s, number = base64.b64decode(page_token, altchars=b"-_", validate=True).decode("ascii").split(" ")
        last = float.fromhex(arrival_s), int(number)
    except (ValueError, OverflowError, binascii.Error):
        raise ValueError("the page token is not one that an earlier answer gave") from None
    if not math.isfinite(last[0]) or not 0 < last[1] < 2**63:
        raise ValueError("the page token is not one that an earlier answer gave")
    return last


def _outputs(connection: Connection, request_ids: Sequence[str], first_index: int = 0) -> dict[str, StoredOutput]:
    """Output of each from `first_index` on. Raises LedgerCorrupt when the chunks of one do not join."""
    chunks: dict[str, list[Any]] = {request_id: [] for request_id in request_ids}
    for table in (tokens, tails):
        columns = table.c
        num_tokens = columns["count"].label("num_tokens")
        statement = select(columns.request_id, columns.first_index, num_tokens, columns.token_ids, columns.logprobs)
        wanted = statement.where(columns.request_id.in_(request_ids), columns.first_index + columns["count"] > first_index)
        for row in connection.execute(wanted.order_by(columns.request_id, columns.first_index)):
            chunks[row.request_id].append(row)
    return {request_id: _joined(request_id, rows, first_index) for request_id, rows in chunks.items()}


def _joined(request_id: str, chunks: Iterable[Any], first_index: int) -> StoredOutput:
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    for chunk in chunks:
        # The first chunk may begin before the index asked for; each later one begins where its forerunner ended.
        skip = max(0, first_index - chunk.first_index)
        if chunk.first_index + skip != first_index + len(token_ids) or len(chunk.token_ids) != 4 * chunk.num_tokens:
            raise LedgerCorrupt(f"{request_id}: the stored chunk at index {chunk.first_index} does not follow the one before it")
        token_ids += unpack_tokens(chunk.token_ids)[skip:]
        logprobs += unpack_logprobs(chunk.logprobs or b"")[skip:]
    return StoredOutput(first_index, tuple(token_ids), tuple(logprobs))


def _stored_request(row: Row[Any]) -> StoredRequest:
    request = Request(
        request_id=row.request_id,
        model=row.model,
        prompt=unpack_tokens(row.prompt),
        arrival_s=row.arrival_s,
        priority=row.priority,
        deadline_s=row.deadline_s,
        tenant=row.tenant,
        detached=bool(row.detached),
        **unpack_parameters(row.parameters),
    )
    return StoredRequest(
        request=request,
        state=State(row.state),
        num_output_tokens=row.output_tokens,
        finish_reason=FinishReason(row.finish_reason) if row.finish_reason else None,
        error=row.error,
        error_code=row.error_code,
        executor=row.executor,
        preemptions=row.preemptions,
        first_token_s=row.started_s,
        finished_s=row.finished_s,
    )
