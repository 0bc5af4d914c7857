from __future__ import annotations

import pytest

from benchmarks.chaos.faults import Action, Fault, Target
from benchmarks.chaos.run import left_quiet, next_token_waits_s
from benchmarks.chaos.sent import Ask, Book, Sent
from benchmarks.chaos.system import Befell

FAULT = Fault(Target.EXECUTOR, Action.KILLED, at_s=1.0, lasts_s=1.0, which=0)


def stream(sent_s: float, *came_s: float) -> Sent:
    return Sent(Ask("r", (65,), 10, 1, detached=True), sent_s, came_s=list(came_s))


def test_the_wait_of_each_stream_that_was_open_when_the_fault_was_healed() -> None:
    book = Book(clock=float)
    book.requests = [
        stream(0.0, 1.0, 2.5, 2.6),
        stream(1.9, 4.0),
        # Over by then, not yet begun, and never served again.
        stream(0.0, 0.5, 1.5),
        stream(2.1, 2.2),
        stream(1.0),
    ]
    assert next_token_waits_s(Befell(FAULT, 1.0, 2.0), book) == pytest.approx([0.5, 2.0])


def test_a_fault_left_quiet_when_no_other_was_under_way() -> None:
    fault, later = Befell(FAULT, 1.0, 2.0), Befell(FAULT, 2.5, 3.0)
    earlier, overlapping = Befell(FAULT, 0.5, 1.5), Befell(FAULT, 1.5, 2.5)
    assert left_quiet(fault, [fault, later, earlier])
    assert not left_quiet(fault, [fault, overlapping])
