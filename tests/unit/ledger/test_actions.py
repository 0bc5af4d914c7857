"""What operators did and hold back, lanes, and the order of priority: in memory, on SQLite and on PostgreSQL."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tokenmill_scheduler.core.request import Lane, State
from tokenmill_scheduler.ledger.errors import LedgerConflict
from tokenmill_scheduler.ledger.port import Ledger
from tokenmill_scheduler.ledger.records import (
    POLICY,
    Action,
    ActionPage,
    ActionQuery,
    ActionVerb,
    Hold,
    Outcome,
    RequestQuery,
    Submission,
)
from tokenmill_scheduler.ledger.sql import SqlLedger

from tests.fakes.ledger_records import prefill, run_to_end, submission


def action(verb: ActionVerb, target: str = "", at_s: float = 100.0, actor: str = "ann") -> Action:
    return Action(at_s, actor, verb, target, f"why {target or 'the queue'}", "detail → 'x'")


def test_actions_are_told_newest_first_page_by_page(ledger: Ledger) -> None:
    done = [action(ActionVerb.CANCEL, f"r{number % 3}", float(number)) for number in range(7)]
    ledger.write(done[:3])
    ledger.write(done[3:])
    assert ledger.actions(ActionQuery()) == ActionPage(tuple(reversed(done)), "")
    assert ledger.actions(ActionQuery("r1")).actions == (done[4], done[1])
    pages: list[Action] = []
    token = ""
    while not pages or token:
        page = ledger.actions(ActionQuery(limit=2, page_token=token))
        pages += page.actions
        token = page.next_page_token
    assert pages == done[::-1]


@pytest.mark.parametrize("page_token", ["x", "-1", "1.5", "é", "²"])
def test_a_foreign_page_token_is_refused(ledger: Ledger, page_token: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 -- the words are each ledger's own
        ledger.actions(ActionQuery(page_token=page_token))


def test_an_action_is_written_with_what_it_changes_or_not_at_all(ledger: Ledger) -> None:
    retry = action(ActionVerb.RETRY, "a")
    assert ledger.write([submission("b"), retry]) == [Outcome.WRITTEN, Outcome.WRITTEN]
    with pytest.raises(LedgerConflict):
        ledger.write([action(ActionVerb.CANCEL, "b"), prefill("b"), prefill("b")])
    assert ledger.actions(ActionQuery()).actions == (retry,)


def test_a_pause_or_a_drain_holds_until_it_is_ended(ledger: Ledger) -> None:
    assert ledger.holds() == ()
    ledger.write([action(ActionVerb.DRAIN_EXECUTOR, "x1"), action(ActionVerb.PAUSE_QUEUE)])
    ledger.write([action(ActionVerb.PAUSE_QUEUE, at_s=101.0, actor="bob"), action(ActionVerb.CANCEL, "r1")])
    detail = "detail → 'x'"
    paused, drained = Hold("", "bob", "why the queue", 101.0, detail), Hold("x1", "ann", "why x1", 100.0, detail)
    assert ledger.holds() == (paused, drained)
    ledger.write([action(ActionVerb.RESUME_QUEUE), action(ActionVerb.UNDRAIN_EXECUTOR, "x2")])
    assert ledger.holds() == (drained,)
    ledger.write([action(ActionVerb.UNDRAIN_EXECUTOR, "x1"), action(ActionVerb.UNDRAIN_EXECUTOR, "x1")])
    assert ledger.holds() == ()


def test_a_policy_holds_with_what_it_says_until_it_is_set_anew_or_reset(ledger: Ledger) -> None:
    for number, says in enumerate(("policy=sjf", "policy=edf")):
        ledger.write([Action(float(number), "ann", ActionVerb.SET_POLICY, POLICY, "why", says)])
        assert ledger.holds() == (Hold(POLICY, "ann", "why", float(number), says),)
    ledger.write([action(ActionVerb.RESET_POLICY, POLICY)])
    assert ledger.holds() == ()


def test_old_actions_are_pruned_and_what_they_hold_stays(ledger: Ledger) -> None:
    done = [action(ActionVerb.DRAIN_EXECUTOR, f"x{number}", float(number)) for number in range(5)]
    ledger.write(done)
    run_to_end(ledger, "ended", at_s=110.0)
    assert ledger.prune(4.0, limit=3) == 0
    assert ledger.actions(ActionQuery()).actions == (done[4], done[3])
    assert ledger.prune(4.0, limit=3) == 0
    assert ledger.actions(ActionQuery()).actions == (done[4],)
    assert [hold.target for hold in ledger.holds()] == ["x0", "x1", "x2", "x3", "x4"]
    assert ledger.find("ended") is not None


def test_a_nul_in_words_for_people_is_shown_as_unknown(sql_ledger: SqlLedger) -> None:
    sql_ledger.write([Action(1.0, "ann", ActionVerb.PAUSE_QUEUE, "", "why\0", "what\0")])
    (kept,) = sql_ledger.actions(ActionQuery()).actions
    assert (kept.reason, kept.detail, sql_ledger.holds()[0].reason) == ("why\ufffd", "what\ufffd", "why\ufffd")


def test_queries_by_lane_and_age(ledger: Ledger) -> None:
    for number, lane in enumerate((Lane.BATCH, Lane.REAL_TIME, Lane.STANDARD, Lane.BATCH)):
        sent = submission(f"r{number}", arrival_s=100.0 + number)
        ledger.write([Submission(replace(sent.request, lane=lane), sent.payload_digest)])

    def found(query: RequestQuery) -> list[str]:
        return [stored.request.request_id for stored in ledger.query(query).requests]

    assert found(RequestQuery(lanes=(Lane.BATCH,))) == ["r3", "r0"]
    assert found(RequestQuery(lanes=(Lane.STANDARD, Lane.REAL_TIME))) == ["r2", "r1"]
    assert found(RequestQuery(arrived_before_s=102.0)) == ["r2", "r1", "r0"]
    assert found(RequestQuery(lanes=(Lane.BATCH,), arrived_before_s=102.0, states=(State.WAITING,))) == ["r0"]


@pytest.mark.parametrize("oldest_first", [True, False])
def test_the_highest_priority_comes_first_and_ties_by_arrival(ledger: Ledger, oldest_first: bool) -> None:
    priorities = [0, 5, -3, 5, 0, 5, -3]
    for number, priority in enumerate(priorities):
        ledger.write([submission(f"r{number}", arrival_s=100.0 + number // 2, priority=priority)])
    pages: list[str] = []
    token = ""
    while not pages or token:
        page = ledger.query(RequestQuery(by_priority=True, oldest_first=oldest_first, limit=2, page_token=token))
        pages += [stored.request.request_id for stored in page.requests]
        token = page.next_page_token
    by_priority = [[1, 3, 5], [0, 4], [2, 6]]
    assert pages == [f"r{number}" for tied in by_priority for number in (tied if oldest_first else tied[::-1])]


def test_a_page_token_of_another_order_is_refused(ledger: Ledger) -> None:
    for number in range(3):
        ledger.write([submission(f"r{number}")])
    token = ledger.query(RequestQuery(limit=1)).next_page_token
    with pytest.raises(ValueError):  # noqa: PT011 -- the words are each ledger's own
        ledger.query(RequestQuery(limit=1, page_token=token, by_priority=True))
