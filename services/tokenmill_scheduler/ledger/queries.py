"""Reads: rows into records. Each function works on the snapshot of the connection it is given."""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from sqlalchemy import ColumnElement, Connection, Row, Select, Table, and_, func, or_, select, tuple_

from tokenmill_scheduler.core.plans import TokenLogprobs
from tokenmill_scheduler.core.request import FinishReason, Lane, Request, State
from tokenmill_scheduler.ledger.codec import unpack_logprobs, unpack_parameters, unpack_tokens
from tokenmill_scheduler.ledger.errors import LedgerCorrupt
from tokenmill_scheduler.ledger.records import RequestPage, RequestQuery, StoredOutput, StoredRequest, StoredTransition
from tokenmill_scheduler.ledger.tables import leases, requests, tails, tokens, transitions

T = TypeVar("T")
_PAGE = 256
_ARRIVAL = tuple_(requests.c.arrival_s, requests.c.number)
# An unfinished request is counted by its tail, an ended one has no tail.
_REQUESTS: Select[Any] = select(
    requests,
    func.coalesce(tails.c.first_index + tails.c["count"], requests.c.num_output_tokens).label("output_tokens"),
    func.coalesce(tails.c.first_token_s, requests.c.first_token_s).label("started_s"),
    func.coalesce(leases.c.scheduler, "").label("scheduler"),
).select_from(
    requests.outerjoin(tails, tails.c.request_id == requests.c.request_id).outerjoin(leases, leases.c.number == requests.c.lease)
)


def find(connection: Connection, request_id: str) -> StoredRequest | None:
    row = connection.execute(_REQUESTS.where(requests.c.request_id == request_id)).first()
    return None if row is None else _stored_request(row)


def payload_digest(connection: Connection, request_id: str) -> bytes | None:
    return connection.scalar(select(requests.c.payload_digest).where(requests.c.request_id == request_id))


def output(connection: Connection, request_id: str, first_index: int) -> StoredOutput:
    return _outputs(connection, {request_id: first_index})[request_id]


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
        yield from _with_outputs(connection, page)
        page = connection.execute(statement.where((page[-1].arrival_s, page[-1].number) < _ARRIVAL)).all()


def in_order(
    connection: Connection, request_ids: Sequence[str], *conditions: ColumnElement[bool]
) -> tuple[tuple[StoredRequest, StoredOutput], ...]:
    """Those of these requests that meet the conditions, in order of arrival, with their output."""
    rows: list[Row[Any]] = []
    for some in _pages(request_ids):
        rows += connection.execute(_REQUESTS.where(requests.c.request_id.in_(some), *conditions)).all()
    rows.sort(key=lambda row: (row.arrival_s, row.number))
    return tuple([pair for page in _pages(rows) for pair in _with_outputs(connection, page)])


def progress(connection: Connection, counts: Mapping[str, int]) -> dict[str, tuple[StoredRequest, StoredOutput]]:
    """The requests with more tokens than counted here, and those that have ended."""
    rows: list[Row[Any]] = []
    for some in _pages(list(counts)):
        rows += connection.execute(_REQUESTS.where(requests.c.request_id.in_(some))).all()
    news = [row for row in rows if row.finished_s is not None or row.output_tokens > counts[row.request_id]]
    outputs = _outputs(connection, {row.request_id: counts[row.request_id] for row in news})
    return {row.request_id: (_stored_request(row), outputs[row.request_id]) for row in news}


def query(connection: Connection, query: RequestQuery) -> RequestPage:
    """One row more than asked for tells whether there is a next page."""
    order = _order(query)
    statement = _REQUESTS.where(*_conditions(query)).limit(query.limit + 1)
    statement = statement.order_by(*(order if query.oldest_first else (column.desc() for column in order)))
    rows = connection.execute(statement).all()
    shown = rows[: query.limit]
    more = len(rows) > query.limit
    return RequestPage(tuple(map(_stored_request, shown)), _page_token(query, shown[-1]) if more else "")


def _order(query: RequestQuery) -> tuple[ColumnElement[Any], ...]:
    """What `query` sorts by, ascending if `oldest_first` and else descending: the highest priority is first in both."""
    arrival = (requests.c.arrival_s, requests.c.number)
    if not query.by_priority:
        return arrival
    return (-requests.c.priority if query.oldest_first else requests.c.priority, *arrival)


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
    if query.lanes:
        yield requests.c.lane.in_([lane.name.lower() for lane in query.lanes])
    if query.arrived_before_s is not None:
        yield requests.c.arrival_s <= query.arrived_before_s
    if query.page_token:
        last, order = _parse_page_token(query), tuple_(*_order(query))
        yield last < order if query.oldest_first else last > order


def _page_token(query: RequestQuery, last: Row[Any]) -> str:
    """The place of a page's last row in the order."""
    words = [last.arrival_s.hex(), str(last.number), *([str(last.priority)] if query.by_priority else [])]
    return base64.urlsafe_b64encode(" ".join(words).encode()).decode()


def _parse_page_token(query: RequestQuery) -> tuple[float, ...]:
    try:
        words = base64.b64decode(query.page_token, altchars=b"-_", validate=True).decode("ascii").split(" ")
        arrival_s, number, *priority = float.fromhex(words[0]), *map(int, words[1:])
    except (ValueError, OverflowError, binascii.Error):
        raise ValueError("the page token is not one that an earlier answer gave") from None
    fits = math.isfinite(arrival_s) and 0 < number < 2**63 and all(abs(value) < 2**31 for value in priority)
    if not fits or len(priority) != query.by_priority:
        raise ValueError("the page token is not one that an earlier answer gave")
    return (*((-value if query.oldest_first else value) for value in priority), arrival_s, number)


def _pages(items: Sequence[T]) -> Iterator[Sequence[T]]:
    return (items[start : start + _PAGE] for start in range(0, len(items), _PAGE))


def _with_outputs(connection: Connection, rows: Sequence[Row[Any]]) -> Iterator[tuple[StoredRequest, StoredOutput]]:
    outputs = _outputs(connection, dict.fromkeys((row.request_id for row in rows), 0))
    return ((_stored_request(row), outputs[row.request_id]) for row in rows)


def _outputs(connection: Connection, first_indexes: Mapping[str, int]) -> dict[str, StoredOutput]:
    """Output of each from its first index on. Raises LedgerCorrupt when the chunks of one do not join."""
    chunks: dict[str, list[Any]] = {request_id: [] for request_id in first_indexes}
    for table in (tokens, tails):
        for some in _pages(list(first_indexes.items())):
            columns = table.c
            num_tokens = columns["count"].label("num_tokens")
            statement = select(columns.request_id, columns.first_index, num_tokens, columns.token_ids, columns.logprobs)
            for row in connection.execute(statement.where(_from(table, some)).order_by(columns.request_id, columns.first_index)):
                chunks[row.request_id].append(row)
    return {request_id: _joined(request_id, chunks[request_id], first) for request_id, first in first_indexes.items()}


def _from(table: Table, first_indexes: Sequence[tuple[str, int]]) -> ColumnElement[bool]:
    """The chunks that reach beyond these indexes. One list of ids where all begin at 0, as after a restart."""
    end = table.c.first_index + table.c["count"]
    if not any(first for _, first in first_indexes):
        return and_(table.c.request_id.in_([request_id for request_id, _ in first_indexes]), end > 0)
    return or_(*(and_(table.c.request_id == request_id, end > first) for request_id, first in first_indexes))


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
        lane=Lane[row.lane.upper()],
        queue_deadline_s=row.queue_deadline_s,
        retry_of=row.retry_of,
        parent=row.parent,
        choice=row.choice,
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
        lease=row.lease,
        scheduler=row.scheduler,
        cached_tokens=row.cached_tokens,
    )
