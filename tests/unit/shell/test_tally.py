"""Counting put off: in order, bounded, and all done when somebody looks."""

from __future__ import annotations

from tokenmill_scheduler.core.request import Lane
from tokenmill_scheduler.metrics import Metrics
from tokenmill_scheduler.tally import MOST, Tally

from tests.fakes.shell import request


def test_what_is_put_off_is_done_in_order_and_never_too_much_of_it() -> None:
    tally, done = Tally(), list[int]()
    for number in range(3 * MOST + 5):
        tally(done.append, number)
        assert len(tally) < MOST
        assert done == list(range(number + 1 - len(tally)))
    assert len(done) == 3 * MOST
    tally.settle()
    tally.settle()
    assert (done, len(tally)) == (list(range(3 * MOST + 5)), 0)


def test_each_is_counted_at_its_own_time() -> None:
    """Whenever it is settled: the times are those of the calls, and the policy the one in force then."""
    metrics, tally = Metrics("fcfs"), Tally()
    tally(metrics.accept, request("a"), 1.0)
    tally(metrics.use_policy, "sjf")
    tally(metrics.accept, request("b"), 2.0)
    assert metrics.accepted[Lane.STANDARD] == 0
    tally.settle()
    assert metrics.accepted[Lane.STANDARD] == 2
    assert set(metrics.queue_time.histograms) == {(lane, policy) for lane in Lane for policy in ("fcfs", "sjf")}
