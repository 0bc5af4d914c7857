from __future__ import annotations

from benchmarks.chaos.faults import Action, Fault, Target
from benchmarks.chaos.run import Waits, left_quiet, next_token_waits
from benchmarks.chaos.sent import Ask, Book, Sent
from benchmarks.chaos.system import Befell

FAULT = Fault(Target.EXECUTOR, Action.KILLED, at_s=1.0, lasts_s=1.0, which=0)


def stream(sent_s: float, *came_s: float) -> Sent:
    return Sent(Ask("r", (65,), 10, 1, detached=True), sent_s, came_s=list(came_s))


def test_the_wait_of_each_stream_that_was_open_when_the_fault_was_healed() -> None:
    book = Book(clock=float)
    book.requests = [
        stream(0.0, 1.0, 2.5, 2.6),
        stream(0.5, 1.9, 4.0),
        # Over by then, in the queue, not yet sent, and never served again.
        stream(0.0, 0.5, 1.5),
        stream(1.9, 4.0),
        stream(2.1, 2.2),
        stream(1.0),
    ]
    fault = Befell(FAULT, 1.0, 2.0)
    waits = next_token_waits(fault, [Befell(FAULT, 0.0, 0.5), fault], book)
    assert waits == Waits([0.5, 2.0], cut_short=0)
    waits = next_token_waits(fault, [fault, Befell(FAULT, 3.0, 9.0)], book)
    assert waits == Waits([0.5], cut_short=1)


def test_a_fault_left_quiet_when_no_other_was_under_way() -> None:
    fault, later = Befell(FAULT, 1.0, 2.0), Befell(FAULT, 2.5, 3.0)
    earlier, overlapping = Befell(FAULT, 0.5, 1.5), Befell(FAULT, 1.5, 2.5)
    assert left_quiet(fault, [fault, later, earlier])
    assert not left_quiet(fault, [fault, overlapping])
