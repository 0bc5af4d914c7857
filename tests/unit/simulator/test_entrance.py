"""Who is refused at the entrance: by the overload and the limits of the queue, as the service does; and who comes again."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tokenmill_scheduler.core.backlog import QueueLimits
from tokenmill_scheduler.core.overload import OverloadConfig
from tokenmill_scheduler.core.request import Lane
from tokenmill_simulator.compare import Run, run
from tokenmill_simulator.entrance import Admittance
from tokenmill_simulator.figures import Target
from tokenmill_simulator.requests import SimulatedRequest
from tokenmill_workloads import Arrival

from tests.unit.simulator.loads import COST, small_machines, together

_OVERLOAD = OverloadConfig(ttft_target_s=60.0, queue_delay_s=1.0, hold_s=0.2, recovery_s=0.5)


def _too_much() -> list[SimulatedRequest]:
    """For 6 s twice what the machine can do; one in five is real-time, and some come when all is over."""
    lanes = (Lane.REAL_TIME, *[Lane.STANDARD] * 4)
    busy = [SimulatedRequest(Arrival(0.025 * at, 5, 10), lane=lanes[at % 5]) for at in range(240)]
    return [*busy, *[SimulatedRequest(Arrival(60.0 + at, 5, 10)) for at in range(5)]]


def _run(admittance: Admittance, leaves_s: float | None = None) -> Run:
    on = replace(small_machines(num_blocks=400, seqs=2), cost=replace(COST, step_s=1e-2))
    requests = [replace(request, leaves_s=leaves_s) for request in _too_much()]
    return run("fcfs", replace(on.config(), overload=_OVERLOAD), requests, on, Target(), admittance=admittance)


def test_the_standard_lane_is_refused_while_the_overload_lasts() -> None:
    refused = _run(Admittance(QueueLimits()))
    measures, figures = refused.measures, refused.figures
    assert 0 < figures.refused == figures.refusals == measures.refused.sum() == figures.not_done
    assert {request.lane for request, out in zip(measures.requests, measures.refused, strict=True) if out} == {Lane.STANDARD}
    assert not measures.refused[-5:].any(), "it is over"
    assert np.isnan(measures.first_token_s[measures.refused]).all()
    taken = _run(Admittance())
    assert (taken.figures.refused, taken.figures.not_done) == (0, 0)
    assert figures.lanes["standard"].p50 < taken.figures.lanes["standard"].p50


def test_who_comes_again_when_told_to_is_served_at_last() -> None:
    refused, again = (_run(Admittance(QueueLimits(), retries)) for retries in (0, 100))
    assert again.figures.refused == again.figures.not_done == 0
    assert again.figures.refusals > refused.figures.refusals
    late = again.measures.first_token_s[refused.measures.refused] - again.measures.arrival_s[refused.measures.refused]
    assert (late > _OVERLOAD.recovery_s).all(), "its wait is from when it first came, and it obeys the delay"


def test_who_has_left_does_not_come_again() -> None:
    """A delay that reaches beyond that is a refusal for good; who was let in and leaves is cancelled."""
    measures = _run(Admittance(QueueLimits(), 100), leaves_s=2.0).measures
    assert 0 < measures.refused.sum() < measures.refusals
    assert not measures.done[measures.refused].any()
    left = ~measures.done & ~measures.refused
    assert left.any()
    assert measures.ended_s[left] == pytest.approx(measures.arrival_s[left] + 2.0)
    assert (measures.ended_s - measures.arrival_s)[measures.done].max() <= 2.0


@pytest.mark.parametrize("retries", [0, 2])
def test_what_can_never_fit_does_not_come_again(retries: int) -> None:
    on = small_machines(num_blocks=400, seqs=1)
    requests = together((5, 5), (50, 50), (5, 5))
    only = run("fcfs", on.config(), requests, on, Target(), admittance=Admittance(QueueLimits(max_tokens=60), retries))
    assert only.measures.refused.tolist() == [False, True, False]
    assert only.figures.refusals == 1
