"""What each policy promises, under random load in simulation: order, strictness, that nobody starves, and shares.

The same promises as in `tests/property/test_policies.py`, over pipelined plans and a clock: requests come while others run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenmill_scheduler.core.policy import POLICIES
from tokenmill_scheduler.core.request import Lane
from tokenmill_simulator.compare import run
from tokenmill_simulator.figures import Target
from tokenmill_simulator.measures import Measures
from tokenmill_simulator.requests import Mix, SimulatedRequest, mixed
from tokenmill_workloads import Arrival, burst, poisson

from tests.unit.simulator.loads import small_machines

few = settings(max_examples=5, deadline=None, derandomize=True)
# What sorts requests within a lane, before their arrival.
_WITHIN: dict[str, Callable[[SimulatedRequest], float]] = {
    "fcfs": lambda request: 0,
    "priority": lambda request: -request.priority,
    "sjf": lambda request: request.arrival.output_tokens,
    "edf": lambda request: inf if request.deadline_s is None else request.arrival.at_s + request.deadline_s,
    "lpm": lambda request: 0,
}
# A plan is made before the results of the two ahead of it are in.
_PLANS_S = 0.02


def _load(seed: int, count: int, rate: float) -> list[SimulatedRequest]:
    """Random arrivals of random lengths, lanes, priorities and deadlines, of which none passes."""
    arrivals = poisson(burst(count, seed=seed, prompt_tokens=(1, 20), output_tokens=(1, 20)), rate, seed)
    return mixed(arrivals, Mix((20, 60, 20), 3, (0, 1, 2), (1e4, 2e4, 3e4)), seed)


def _played(policy: str, requests: list[SimulatedRequest], turn: int, slots: int) -> Measures:
    """With blocks for all, so that slots alone are short; lanes have no guarantee."""
    on = small_machines(num_blocks=4_000, seqs=slots, tokens=512)
    config = replace(on.config(), policy=policy, ageing_turn=turn, max_priority_wait_s=0.0, lane_shares=(0, 0, 0))
    config = replace(config, overload=replace(config.overload, enabled=False))
    return run(policy, config, requests, on, Target()).measures


@pytest.mark.parametrize("policy", POLICIES)
@few
@given(seed=st.integers(0, 10_000), slots=st.integers(1, 4))
def test_who_starts_was_before_all_that_waited(policy: str, seed: int, slots: int) -> None:
    """By lane, then by the policy, then by arrival. Under `priority` those that were displaced have started already."""
    requests = _load(seed, 50, rate=60.0)
    measures = _played(policy, requests, turn=0, slots=slots)
    ranks = [(request.lane, _WITHIN[policy](request), request.arrival.at_s) for request in requests]
    for place, started_s in enumerate(measures.started_s):
        waited = np.flatnonzero((measures.arrival_s < started_s) & (measures.started_s > started_s + _PLANS_S))
        assert all(ranks[place] < ranks[other] for other in waited)


@pytest.mark.parametrize("policy", [policy for policy in POLICIES if policy != "fcfs"])
@few
@given(seed=st.integers(0, 10_000), turn=st.integers(1, 6))
def test_nobody_starves(policy: str, seed: int, turn: int) -> None:
    """With n older ones that have not ended, a request starts within (n + 1) × `turn` starts, whatever comes after it."""
    requests = [replace(request, lane=Lane.STANDARD) for request in _load(seed, 50, rate=60.0)]
    measures = _played(policy, requests, turn, slots=1)
    for place, started_s in enumerate(measures.started_s):
        arrived_s = measures.arrival_s[place]
        # Those that were displaced among them, which come again.
        older = np.sum((measures.arrival_s < arrived_s) & (measures.ended_s > arrived_s))
        starts = np.sum((measures.started_s > arrived_s) & (measures.started_s <= started_s))
        assert starts <= (older + 1) * turn


@pytest.mark.parametrize("policy", POLICIES)
def test_tenants_get_their_shares_within_5_per_cent(policy: str) -> None:
    """Three tenants with requests of different lengths, all of them always waiting: tokens by weight."""
    weights = {"a": 1.0, "b": 2.0, "c": 3.0}
    lengths = {"a": (5, 40), "b": (20, 10), "c": (3, 5)}
    each = {tenant: SimulatedRequest(Arrival(0.0, *lengths[tenant]), tenant=tenant) for tenant in weights}
    requests = [each[tenant] for tenant in weights for _ in range(4_000 // sum(lengths[tenant]))]
    on = small_machines(num_blocks=4_000, seqs=4, tokens=512)
    config = replace(on.config(), policy=policy, fair_share=True, weights=weights)
    config = replace(config, overload=replace(config.overload, enabled=False))
    measures = run(policy, config, requests, on, Target()).measures
    # While all three have some left: that of the heaviest ends first.
    until_s = max(measures.ended_s[place] for place, request in enumerate(requests) if request.tenant == "c")
    served = dict.fromkeys(weights, 0)
    for place, request in enumerate(requests):
        if measures.ended_s[place] <= until_s:
            served[request.tenant] += request.arrival.prompt_tokens + int(measures.tokens[place])
    for tenant, weight in weights.items():
        assert served[tenant] == pytest.approx(sum(served.values()) * weight / 6, rel=0.05), served
