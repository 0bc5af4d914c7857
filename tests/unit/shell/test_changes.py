"""What a cancel is answered, by the states of the choices ahead of it and after it."""

from __future__ import annotations

import pytest
from tokenmill_scheduler.changes import cancellation
from tokenmill_scheduler.core.request import State
from tokenmill_scheduler.desk.records import Cancellation

DECODE, DONE, CANCELLED, EXPIRED = State.DECODE, State.DONE, State.CANCELLED, State.EXPIRED


@pytest.mark.parametrize(
    ("before", "after", "state", "already_ended"),
    [
        ([DECODE], [CANCELLED], CANCELLED, False),
        ([DONE], [DONE], DONE, True),
        ([CANCELLED], [CANCELLED], CANCELLED, True),
        # It ended by itself while the cancel was on its way.
        ([DECODE], [DONE], DONE, True),
        ([DECODE, DONE], [CANCELLED, DONE], CANCELLED, False),
        ([EXPIRED, DECODE], [EXPIRED, CANCELLED], CANCELLED, False),
        # Given again.
        ([EXPIRED, CANCELLED], [EXPIRED, CANCELLED], CANCELLED, True),
        ([EXPIRED, DONE], [EXPIRED, DONE], EXPIRED, True),
        # One was cancelled by itself, earlier.
        ([CANCELLED, DECODE], [CANCELLED, DONE], CANCELLED, True),
    ],
)
def test_a_cancel_tells_whether_it_cancelled_anything(
    before: list[State], after: list[State], state: State, already_ended: bool
) -> None:
    ids = ["a", "a/1"]
    answer = cancellation(dict(zip(ids, before, strict=False)), dict(zip(ids, after, strict=False)))
    assert answer == Cancellation(state, already_ended)
