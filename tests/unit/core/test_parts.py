"""The small parts by themselves: transitions, arithmetic, forecast, alarms."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tokenmill_scheduler.core.alarms import Alarms
from tokenmill_scheduler.core.diagram import document, mermaid
from tokenmill_scheduler.core.forecast import Forecast
from tokenmill_scheduler.core.live import Ending, LiveRequest
from tokenmill_scheduler.core.request import TERMINAL, TRANSITIONS, FinishReason, IllegalTransition, Request, Sampling, State
from tokenmill_scheduler.core.sequence import Sequence
from tokenmill_scheduler.core.shares import FairShare

_DOCS = Path(__file__).parents[3] / "docs"


def _live(ordinal: int, *, state: State = State.WAITING) -> LiveRequest:
    request = Request(f"r{ordinal}", "m", (1, 2, 3), Sampling(max_tokens=4, seed=0), 0.0)
    return LiveRequest(request, ordinal, state)


def _sequence(known: int = 8, limit: int = 100) -> Sequence:
    return Sequence(1, "x", None, limit, known, known)


def test_an_illegal_transition_raises_and_changes_nothing() -> None:
    for before in State:
        for after in State:
            live = _live(1, state=before)
            if after in TRANSITIONS[before]:
                assert (live.move(after, 1.0).before, live.state) == (before, after)
            else:
                with pytest.raises(IllegalTransition):
                    live.move(after, 1.0)
                with pytest.raises(IllegalTransition):
                    live.end(Ending(after, FinishReason.STOP), 1.0)
                assert live.state is before


def test_every_state_can_end_and_no_end_goes_on() -> None:
    assert {State.DONE, State.CANCELLED, State.EXPIRED, State.FAILED} == TERMINAL
    for state in State:
        assert (state in TERMINAL) == (not TRANSITIONS[state])


def test_the_document_of_states_is_up_to_date() -> None:
    assert (_DOCS / "request-states.md").read_text(encoding="utf-8") == document()
    assert "preempted --> prefill" in mermaid()
    assert "waiting --> done" not in mermaid()


def test_prefill_in_chunks_then_decode_is_one_arithmetic() -> None:
    sequence = _sequence(known=8)
    remaining = []
    for count in (5, 3, 1):
        sequence.plan(count)
        remaining.append(sequence.remaining)
    assert remaining == [3, 1, 1]
    assert (sequence.planned_computed, sequence.planned_known, sequence.plans_out) == (9, 10, 3)
    sequence.settle(5, 0)
    sequence.settle(3, 1)
    sequence.settle(1, 1)
    assert (sequence.computed, sequence.known, sequence.plans_out) == (9, 10, 0)
    assert (sequence.planned_computed, sequence.planned_known) == (9, 10)


def test_a_result_below_what_was_booked_corrects_the_planned_figures() -> None:
    sequence = _sequence(known=8)
    sequence.plan(8)
    sequence.plan(1)
    sequence.settle(0, 0)
    assert (sequence.computed, sequence.planned_computed, sequence.planned_known) == (0, 1, 8)
    sequence.settle(1, 0)
    assert (sequence.remaining, sequence.planned_computed) == (7, 1)


def test_a_cached_prefix_puts_a_sequence_ahead_of_its_bookings_until_its_first_result() -> None:
    """Booked as a chunk of 3 and the other 5; the cache had 4, so the first plan sampled at 7 of 8 + 0, the second at 8."""
    sequence = _sequence(known=7)
    sequence.plan(3)
    sequence.plan(4)
    assert (sequence.planned_computed, sequence.planned_known) == (7, 8)
    assert sequence.most_computed() == 8
    sequence.settle(4 + 3, 1)
    # What is left of the second plan is one decode.
    assert (sequence.computed, sequence.known, sequence.planned_computed, sequence.planned_known) == (7, 8, 8, 9)
    assert sequence.most_computed() == 8
    sequence.settle(1, 1)
    assert (sequence.planned_computed, sequence.planned_known, sequence.remaining) == (8, 9, 1)


def test_a_sequence_ahead_of_its_bookings_is_not_planned_past_its_limit() -> None:
    sequence = _sequence(known=7, limit=8)
    sequence.plan(3)
    sequence.plan(4)
    sequence.settle(4 + 3, 1)
    assert (sequence.planned_computed, sequence.planned_known, sequence.exhausted) == (7, 8, True)
    sequence.settle(0, 0)
    assert (sequence.planned_computed, sequence.planned_known) == (7, 8)


def test_a_predicted_hit_is_planned_around_and_never_counted_on() -> None:
    sequence = _sequence(known=8)
    sequence.predicted = 4
    assert sequence.remaining == 4
    sequence.plan(4)
    # If the cache has them, the next plan is a decode; by the books, half of the prompt is still to do.
    assert (sequence.remaining, sequence.planned_computed, sequence.planned_known) == (1, 4, 8)
    sequence.plan(1)
    sequence.settle(4, 0)
    assert (sequence.planned_computed, sequence.planned_known, sequence.remaining) == (5, 8, 3)


def test_exhausted_when_the_plans_out_bring_it_to_its_limit() -> None:
    sequence = _sequence(known=8, limit=10)
    sequence.plan(8)
    assert not sequence.exhausted
    sequence.plan(1)
    assert sequence.exhausted


def test_who_has_not_sampled_in_the_first_step_of_a_plan_does_not_go_on() -> None:
    """Its prompt was refused in the plan ahead: of the two tokens that it may have in two steps, both are the prompt's."""
    sequence = _sequence(known=4)
    sequence.plan(4)
    sequence.plan(1)
    sequence.go_on(1)
    assert (sequence.planned_computed, sequence.planned_known) == (6, 7)
    sequence.settle(0, 0)
    assert (sequence.planned_computed, sequence.planned_known) == (2, 4)


def test_the_forecast_subtracts_what_is_promised_until_a_result_confirms_it() -> None:
    forecast, sequence = Forecast(block_size=4, available=10), _sequence(known=8)
    forecast.reserve(sequence, 3)
    sequence.plan(8)
    assert forecast.free == 7
    sequence.settle(8, 1)
    forecast.available = 8
    forecast.confirm(sequence)
    assert (sequence.held, sequence.reserved, forecast.free) == (2, 3, 7)
    forecast.trim(sequence)
    assert (sequence.reserved, forecast.free) == (2, 8), "the block booked for the next token is given back"
    forecast.available = 10
    forecast.forget(sequence)
    assert (forecast.free, forecast.promised) == (10, 0)


def test_trim_keeps_what_plans_out_may_take() -> None:
    forecast, sequence = Forecast(block_size=4, available=10), _sequence(known=8)
    forecast.reserve(sequence, 3)
    sequence.plan(5)
    forecast.trim(sequence)
    assert (sequence.reserved, forecast.free) == (2, 8)


def test_alarms_give_the_earliest_of_what_is_set_now_and_stay_bounded() -> None:
    rng = random.Random(3)
    alarms, times = Alarms(), dict[str, float]()
    for turn in range(3_000):
        key = f"k{rng.randrange(20)}"
        if rng.random() < 0.3:
            times.pop(key, None)
            alarms.discard(key)
        else:
            times[key] = float(rng.randrange(50))
            alarms.set(key, times[key], turn)
        earliest = alarms.earliest()
        assert (earliest[0] if earliest else None) == min(times.values(), default=None)
        assert earliest is None or times[earliest[1]] == earliest[0]
        assert len(alarms) == len(times)
    assert len(alarms._heap) < 200


def test_accounts_of_many_tenants_are_bounded_and_those_that_are_most_ahead_are_kept() -> None:
    share = FairShare(lambda tenant: 1.0)
    for tokens in range(65):
        share.came(f"t{tokens}")
        share.charge(f"t{tokens}", tokens)
        share.left(f"t{tokens}")
    assert len(share) < 40, "none was forgotten"
    assert [share.account(f"t{tokens}") for tokens in (0, 20, 40, 64)] == [32, 32, 40, 64]
