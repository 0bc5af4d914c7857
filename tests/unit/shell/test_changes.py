"""What a cancel is answered, by the states of the choices ahead of it and after it; whether an update is to be seen."""

from __future__ import annotations

import pytest
from tokenmill_scheduler.changes import cancellation, has_changed
from tokenmill_scheduler.core.request import State
from tokenmill_scheduler.desk.records import Cancellation
from tokenmill_scheduler.ledger.records import Command, Verb

from tests.fakes.shell import request

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


@pytest.mark.parametrize(
    ("before", "after", "wanted", "changed"),
    [
        ((0, None), (7, None), (7, None), True),
        ((7, None), (7, None), (7, None), True),
        ((0, None), (0, None), (7, None), False),
        # Another update came behind it.
        ((0, None), (5, None), (7, None), True),
        # Another update alone.
        ((0, None), (5, None), (7, 9.0), False),
        ((0, None), (5, 9.0), (7, 9.0), True),
        ((0, 8.0), (5, 8.0), (None, 9.0), False),
    ],
)
def test_an_update_is_seen_in_the_values_that_it_or_a_later_one_has_made(
    before: tuple[int, float | None],
    after: tuple[int, float | None],
    wanted: tuple[int | None, float | None],
    changed: bool,
) -> None:
    old, new = (request("a", priority=priority, deadline_s=deadline_s) for priority, deadline_s in (before, after))
    command = Command(1, "a", Verb.UPDATE, "", *wanted)
    assert has_changed(old, new, command) is changed
