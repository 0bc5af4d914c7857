"""Random batches, right and wrong ones, on a database and on the in-memory ledger: same answers, same refusals, same content."""

from __future__ import annotations

import itertools

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenmill_scheduler.core.effects import TokensGenerated, Transitioned
from tokenmill_scheduler.core.events import Updated
from tokenmill_scheduler.core.plans import TokenLogprobs
from tokenmill_scheduler.core.request import TRANSITIONS, FinishReason, State
from tokenmill_scheduler.ledger.errors import LedgerConflict
from tokenmill_scheduler.ledger.port import Ledger
from tokenmill_scheduler.ledger.records import Record, RequestQuery
from tokenmill_scheduler.ledger.sql import SqlLedger

from tests.fakes.ledger_records import submission, tokens
from tests.fakes.memory_ledger import MemoryLedger

REQUESTS = 3
# Each example works on requests of its own, so that all share one database.
_example = itertools.count()


class Draft:
    """What the records drawn so far make of the requests, if they are all accepted."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.states: dict[str, State] = {}
        self.lengths: dict[str, int] = {}
        # Drawn once a request: it has log probabilities of all its tokens or of none.
        self.logprobs: dict[str, bool] = {}

    @property
    def ids(self) -> list[str]:
        return [f"{self.prefix}-{number}" for number in range(REQUESTS)]

    def record(self, draw: st.DrawFn) -> Record:
        request_id = draw(st.sampled_from(self.ids))
        state = self.states.get(request_id)
        if state is None or draw(st.integers(0, 9)) == 0:
            return self._submission(draw, request_id)
        if draw(st.integers(0, 19)) == 0:
            return self._mistake(draw, request_id)
        following = sorted(TRANSITIONS[state])
        if not following:
            return self._submission(draw, request_id)
        kind = draw(st.sampled_from(["tokens", "tokens", "move", "update"]))
        if kind == "tokens":
            return self._tokens(draw, request_id, self.lengths[request_id])
        if kind == "update":
            return Updated(request_id, draw(st.none() | st.integers(-9, 9)), draw(st.none() | st.floats(0, 1e9)))
        return self._move(draw, request_id, state, draw(st.sampled_from(following)))

    def _submission(self, draw: st.DrawFn, request_id: str) -> Record:
        self.states.setdefault(request_id, State.WAITING)
        self.lengths.setdefault(request_id, 0)
        digest = draw(st.sampled_from([b"one", b"other"]))
        return submission(request_id, digest=digest, arrival_s=draw(st.sampled_from([1.0, 2.0])), tenant=self.prefix)

    def _tokens(self, draw: st.DrawFn, request_id: str, first_index: int) -> Record:
        token_ids = tuple(draw(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=draw(st.sampled_from([1, 3, 70])))))
        self.lengths[request_id] = first_index + len(token_ids)
        return self._generated(draw, request_id, first_index, token_ids, draw(st.floats(0, 1e9)))

    def _generated(self, draw: st.DrawFn, request_id: str, first_index: int, token_ids: tuple[int, ...], at_s: float) -> Record:
        if request_id not in self.logprobs:
            self.logprobs[request_id] = draw(st.booleans())
        if not self.logprobs[request_id]:
            return tokens(request_id, first_index, *token_ids, at_s=at_s)
        logprobs = tuple(TokenLogprobs(-float(token_id), ((token_id, -0.5),)) for token_id in token_ids)
        return TokensGenerated((request_id,), (first_index,), (len(token_ids),), token_ids, at_s, {request_id: logprobs})

    def _move(self, draw: st.DrawFn, request_id: str, before: State, after: State) -> Record:
        self.states[request_id] = after
        reason = draw(st.sampled_from([None, *FinishReason])) if not TRANSITIONS[after] else None
        executor = draw(st.sampled_from(["", "x0", "x1"]))
        return Transitioned(request_id, before, after, draw(st.floats(0, 1e9)), "why", executor, reason, "", 3 if reason else 0)

    def _mistake(self, draw: st.DrawFn, request_id: str) -> Record:
        """Often refused, sometimes right by chance."""
        if draw(st.booleans()):
            return self._generated(draw, request_id, draw(st.integers(0, self.lengths[request_id] + 1)), (7,), 1.0)
        return Transitioned(request_id, draw(st.sampled_from(sorted(State))), State.DECODE, 5.0)


def content(ledger: Ledger, draft: Draft) -> list[object]:
    everything: list[object] = [
        (ledger.find(id_), ledger.payload_digest(id_), ledger.output(id_), ledger.output(id_, 1), ledger.transitions(id_))
        for id_ in draft.ids
    ]
    everything.append(ledger.query(RequestQuery(tenant=draft.prefix)).requests)
    everything.append([pair for pair in ledger.unfinished() if pair[0].request.tenant == draft.prefix])
    return everything


@settings(
    max_examples=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_a_database_and_the_ledger_in_memory_agree(sql_ledger: SqlLedger, data: st.DataObject) -> None:
    draft = Draft(f"example{next(_example)}")
    memory = MemoryLedger()
    for _ in range(data.draw(st.integers(1, 6))):
        kept = dict(draft.states), dict(draft.lengths)
        batch = data.draw(st.composite(lambda draw: [draft.record(draw) for _ in range(draw(st.integers(1, 6)))])())
        try:
            expected = memory.write(batch)
        except LedgerConflict:
            draft.states, draft.lengths = kept
            try:
                sql_ledger.write(batch)
            except LedgerConflict:
                continue
            raise AssertionError(f"only the ledger in memory refused {batch}") from None
        assert sql_ledger.write(batch) == expected
    assert content(sql_ledger, draft) == content(memory, draft)
