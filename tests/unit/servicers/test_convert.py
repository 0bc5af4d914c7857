"""Maps between the core's words and the protocol's: complete, one to one, and equal in name."""

from __future__ import annotations

import pytest
from tokenmill.inference.v1 import types_pb2 as types
from tokenmill_scheduler.core.request import FinishReason, State
from tokenmill_scheduler.servicers import convert


def test_every_state_has_its_namesake_and_the_way_back() -> None:
    assert {state: types.RequestState.Name(number) for state, number in convert.STATES.items()} == {
        state: f"REQUEST_STATE_{state.name}" for state in State
    }
    assert set(convert.STATES.values()) | {types.REQUEST_STATE_UNSPECIFIED} == set(types.RequestState.values())
    assert {convert.state_of(number) for number in types.RequestState.values()} == {*State, None}
    assert convert.state_of(99) is None


def test_every_finish_reason_has_its_namesake() -> None:
    assert {reason: types.FinishReason.Name(number) for reason, number in convert.FINISH_REASONS.items()} == {
        reason: f"FINISH_REASON_{reason.name}" for reason in FinishReason
    }
    assert set(convert.FINISH_REASONS.values()) | {types.FINISH_REASON_UNSPECIFIED} == set(types.FinishReason.values())


@pytest.mark.parametrize("seconds", [0.0, 1.5, 1_700_000_000.25, 1_699_999_999.9999999, -0.5])
def test_times_survive_the_way_there_and_back(seconds: float) -> None:
    stamp = convert.timestamp(seconds)
    assert 0 <= stamp.nanos < 1_000_000_000
    assert convert.seconds_of(stamp) == pytest.approx(seconds, abs=1e-6)
