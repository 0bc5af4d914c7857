"""A request of several choices in every ledger: written and pruned as a whole, otherwise a row each."""

from __future__ import annotations

from dataclasses import replace

from tokenmill_scheduler.core.choices import further_choices
from tokenmill_scheduler.core.effects import Transitioned
from tokenmill_scheduler.core.events import Updated
from tokenmill_scheduler.core.request import FinishReason, State
from tokenmill_scheduler.ledger.port import Ledger
from tokenmill_scheduler.ledger.records import Outcome, RequestQuery, Submission

from tests.fakes.ledger_records import submission

WRITTEN, JOINED, CONFLICT = Outcome.WRITTEN, Outcome.JOINED, Outcome.CONFLICT


def group(request_id: str = "a", n: int = 3, digest: bytes = b"d") -> Submission:
    plain = submission(request_id).request
    return Submission(replace(plain, n=n - 1, best_of=n, logprobs_hidden=True), digest)


def ended(request_id: str, at_s: float) -> Transitioned:
    return Transitioned(request_id, State.WAITING, State.CANCELLED, at_s, finish_reason=FinishReason.CANCELLED)


def stored_ids(ledger: Ledger) -> list[str]:
    return [stored.request.request_id for stored in ledger.query(RequestQuery(oldest_first=True)).requests]


def test_each_choice_is_stored_without_loss(ledger: Ledger) -> None:
    written = group()
    assert ledger.write([written]) == [WRITTEN]
    assert stored_ids(ledger) == ["a", "a/1", "a/2"]
    for request in (written.request, *further_choices(written.request)):
        stored = ledger.find(request.request_id)
        assert stored is not None
        assert (stored.request, stored.state) == (request, State.WAITING)
        assert len(ledger.transitions(request.request_id)) == 1
    assert [stored.request.choice for stored, _ in ledger.unfinished()] == [0, 1, 2]


def test_c09_an_equal_payload_joins_the_whole_and_another_writes_nothing(ledger: Ledger) -> None:
    lease = ledger.take_lease("s", 60)
    assert ledger.write([group(), group()], lease) == [WRITTEN, JOINED]
    assert ledger.write([group(), group(n=4, digest=b"other")], lease) == [JOINED, CONFLICT]
    assert stored_ids(ledger) == ["a", "a/1", "a/2"]
    leases = [stored.lease for stored, _ in ledger.unfinished()]
    assert leases == [lease.number] * 3


def test_choices_live_apart(ledger: Ledger) -> None:
    ledger.write([group()])
    ledger.write([ended("a", 105.0), Updated("a/2", priority=5)])
    states = [stored.state for stored in ledger.query(RequestQuery(oldest_first=True)).requests]
    assert states == [State.CANCELLED, State.WAITING, State.WAITING]
    stored = ledger.find("a/2")
    assert stored is not None
    assert stored.request.priority == 5


def test_they_are_taken_over_together(ledger: Ledger) -> None:
    old = ledger.take_lease("old", 60)
    ledger.write([group()], old)
    new = ledger.take_lease("new", 60)
    estate = ledger.take_over(new, [old.number])
    assert [stored.request.request_id for stored, _ in estate.requests] == ["a", "a/1", "a/2"]


def test_a_group_is_pruned_as_a_whole_once_all_of_it_has_ended(ledger: Ledger) -> None:
    """Were the first gone before the others, its id could be used again beside them."""
    ledger.write([group(), submission("b")])
    ledger.write([ended("a", 105.0), ended("a/1", 106.0), ended("b", 104.0)])
    assert ledger.prune(1_000.0, limit=10) == 1
    assert stored_ids(ledger) == ["a", "a/1", "a/2"]
    ledger.write([ended("a/2", 500.0)])
    assert ledger.prune(500.0, limit=10) == 0
    assert ledger.prune(501.0, limit=1) == 3
    assert stored_ids(ledger) == []
    assert ledger.write([group(digest=b"again")]) == [WRITTEN]


def test_tokens_that_were_not_computed_are_kept_from_when_they_are_told(ledger: Ledger) -> None:
    ledger.write([submission("a")])
    ledger.write([Transitioned("a", State.WAITING, State.PREFILL, 101.0, executor="x")])
    ledger.write([Transitioned("a", State.PREFILL, State.DECODE, 102.0, executor="x", cached_tokens=48)])
    ledger.write([Transitioned("a", State.DECODE, State.PREEMPTED, 103.0)])
    stored = ledger.find("a")
    assert stored is not None
    assert stored.cached_tokens == 48
