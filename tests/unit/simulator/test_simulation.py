"""The simulator keeps the books: every request ends once, with its own tokens, and every block comes back."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenmill_scheduler.core import invariants
from tokenmill_scheduler.core.effects import TokensGenerated
from tokenmill_scheduler.core.overload import OverloadConfig
from tokenmill_scheduler.core.policy import POLICIES
from tokenmill_scheduler.core.request import Lane
from tokenmill_scheduler.core.scheduler import SchedulerConfig
from tokenmill_simulator.compare import Machines, candidate, run
from tokenmill_simulator.cost import UNMEASURED, ServiceCost
from tokenmill_simulator.figures import Target
from tokenmill_simulator.measures import Measures
from tokenmill_simulator.requests import Mix, SimulatedRequest, mixed
from tokenmill_simulator.simulation import Simulation
from tokenmill_workloads import Arrival, at_rate, burst

from tests.unit.simulator.loads import burst_of, small_machines, together

LINK_S = UNMEASURED.link_s
_CANDIDATES = (*POLICIES, "static")


def played(requests: list[SimulatedRequest], on: Machines, config: SchedulerConfig) -> tuple[Simulation, Measures]:
    measures = Measures(requests)
    simulation = Simulation(config, requests, on.executors, on.cost, measures)
    simulation.run()
    return simulation, measures


@st.composite
def loads(draw: st.DrawFn) -> list[SimulatedRequest]:
    """Lengths and gaps of all kinds; some start alike; some end before their client's limit."""
    requests, at_s = [], 0.0
    for _ in range(draw(st.integers(1, 12))):
        at_s += draw(st.sampled_from([0.0, 0.0005, 0.01, 0.5]))
        hash_ids = (draw(st.integers(0, 1)), draw(st.integers(0, 3))) if draw(st.booleans()) else ()
        arrival = Arrival(at_s, draw(st.integers(1, 40)), draw(st.integers(1, 30)), hash_ids, hash_block_tokens=8)
        more = draw(st.sampled_from([None, 30, 60]))
        lane, tenant = draw(st.sampled_from(Lane)), draw(st.sampled_from(["ann", "bob"]))
        requests.append(SimulatedRequest(arrival, lane=lane, tenant=tenant, max_tokens=more and max(more, arrival.output_tokens)))
    return requests


@given(
    requests=loads(),
    name=st.sampled_from(_CANDIDATES),
    count=st.integers(1, 3),
    blocks=st.integers(18, 60),
    seqs=st.integers(1, 5),
    caching=st.booleans(),
)
@settings(max_examples=120, deadline=None)
def test_requests_tokens_and_blocks_are_conserved(
    requests: list[SimulatedRequest], name: str, count: int, blocks: int, seqs: int, caching: bool
) -> None:
    on = small_machines(count=count, num_blocks=blocks, seqs=seqs, tokens=16, caching=caching)
    simulation, measures = played(requests, on, candidate(name, on.config()))
    core = simulation.core
    invariants.check(core)
    assert measures.done.all()
    assert measures.tokens.tolist() == [request.arrival.output_tokens for request in requests]
    assert core.counters.output_tokens == measures.tokens.sum()
    assert (core.num_running, core.num_waiting, core.counters.no_blocks) == (0, 0, 0)
    for executor in simulation.executors:
        assert executor.cache.blocks().held == 0
        assert executor.cache.available == blocks
    assert (measures.arrival_s <= measures.first_token_s).all()
    assert (measures.first_token_s <= measures.ended_s).all()
    assert len(measures.inter_token_s) == measures.tokens.sum() - len(requests)


@pytest.mark.parametrize("name", _CANDIDATES)
def test_the_same_load_gives_the_same_figures(name: str) -> None:
    on = small_machines(num_blocks=400, seqs=8)
    first, second = (run(name, candidate(name, on.config()), burst_of(), on, Target()) for _ in range(2))
    assert json.dumps(asdict(first.figures)) == json.dumps(asdict(second.figures))


def test_steps_of_one_executor_follow_each_other() -> None:
    """Work always waits, so it is never idle; and no step begins before the one before it has ended."""
    on = small_machines(num_blocks=400)
    _, measures = played(burst_of(), on, on.config())
    starts = [step.start_s for step in measures.steps]
    ends = [step.end_s for step in measures.steps]
    assert starts[1:] == ends[:-1]
    assert starts[0] == pytest.approx(LINK_S)


def test_one_request_takes_what_its_steps_cost() -> None:
    """A prefill of 10 tokens samples the first token, 4 decodes the others; the last plan of two ways is on the link."""
    on = small_machines()
    _, measures = played(together((10, 5)), on, on.config())
    assert [step.sequences for step in measures.steps] == [1] * 5
    assert measures.first_token_s[0] == pytest.approx(2 * LINK_S + 1e-3 + 10 * 1e-4)
    assert measures.ended_s[0] == pytest.approx(2 * LINK_S + 2e-3 + 4 * (1e-3 + 1e-4))


@pytest.mark.parametrize(("lead_s", "steps_waited"), [(0.0002, 1), (0.0008, 2)])
def test_who_comes_after_the_next_plan_was_asked_for_waits_a_step_more(lead_s: float, steps_waited: int) -> None:
    """A decode step takes 1.1 ms, and the second request comes 0.5 ms before the end of one."""
    on = replace(small_machines(), service=ServiceCost(lead_s=lead_s))
    decoding, late = Arrival(0.0, 1, 40), Arrival(LINK_S + 10 * 1.1e-3 - 0.5e-3, 1, 1)
    measures = run("fcfs", on.config(), mixed([decoding, late]), on, Target()).measures
    steps_s = 0.5e-3 + (steps_waited - 1) * 1.1e-3 + 1.2e-3 + LINK_S
    assert measures.first_token_s[1] - late.at_s == pytest.approx(steps_s)


@pytest.mark.parametrize(("prefill_lead", "steps_waited"), [(0.1, 1), (0.3, 2)])
def test_the_next_plan_is_asked_for_earlier_behind_a_prompt(prefill_lead: float, steps_waited: int) -> None:
    """By a share of its step, which takes 3 ms; the second request comes 0.5 ms before its end."""
    on = replace(small_machines(), service=ServiceCost(lead_s=0.0002, prefill_lead=prefill_lead))
    prompt, late = Arrival(0.0, 20, 40), Arrival(LINK_S + 3e-3 - 0.5e-3, 1, 1)
    measures = run("fcfs", on.config(), mixed([prompt, late]), on, Target()).measures
    steps_s = 0.5e-3 + (steps_waited - 1) * 1.1e-3 + 1.2e-3 + LINK_S
    assert measures.first_token_s[1] - late.at_s == pytest.approx(steps_s)


def test_what_lies_between_client_and_core_delays_every_token_alike() -> None:
    on = small_machines(num_blocks=400)
    plain, far = (
        run("fcfs", on.config(), burst_of(), replace(on, service=ServiceCost(client_s=client_s)), Target()).measures
        for client_s in (0.0, 0.25)
    )
    assert far.time_to_first_token_s == pytest.approx(plain.time_to_first_token_s + 0.25)
    assert far.latency_s == pytest.approx(plain.latency_s + 0.25)
    assert far.inter_token_s == pytest.approx(plain.inter_token_s)


def test_tokens_that_come_together_count_each() -> None:
    measures = Measures(together((4, 5)))
    measures.happened([TokensGenerated(("0",), (0,), (1,), (7,), 1.0)], 1.0)
    measures.happened([TokensGenerated(("0",), (1,), (4,), (7,) * 4, 1.2)], 1.2)
    assert measures.inter_token_s.tolist() == pytest.approx([0.05] * 4)


def test_continuous_batching_fills_slots_that_static_leaves_empty() -> None:
    on = small_machines(seqs=2)
    requests = together((1, 2), (1, 20), (1, 2), (1, 20))
    runs = {name: run(name, candidate(name, on.config()), requests, on, Target()) for name in ("static", "continuous")}
    assert runs["continuous"].figures.wall_s < 0.8 * runs["static"].figures.wall_s
    assert runs["continuous"].figures.occupancy > runs["static"].figures.occupancy


def test_two_executors_do_twice_as_much() -> None:
    one, two = (small_machines(num_blocks=400, count=count) for count in (1, 2))
    walls = [run("fcfs", on.config(), burst_of(40), on, Target()).figures.wall_s for on in (one, two)]
    assert 1.7 < walls[0] / walls[1] <= 2.1


def test_shared_prefixes_are_computed_once() -> None:
    arrivals = [Arrival(at_s, 42, 1, (7, 8), hash_block_tokens=20) for at_s in (0.0, 1.0)]
    on = small_machines(caching=True)
    simulation, measures = played(mixed(arrivals), on, on.config())
    counters = simulation.core.counters
    assert (counters.prefix_cache_hits, counters.prefix_cache_queries) == (40, 84)
    assert measures.time_to_first_token_s[1] < measures.time_to_first_token_s[0]


def test_a_model_that_ends_early_takes_no_more_tokens_than_it_makes() -> None:
    requests = [replace(request, max_tokens=500) for request in burst_of(5)]
    on = small_machines(num_blocks=400)
    _, measures = played(requests, on, on.config())
    assert measures.tokens.tolist() == [request.arrival.output_tokens for request in requests]


def test_a_request_past_its_deadline_is_not_done() -> None:
    requests = [replace(request, deadline_s=0.01) for request in together((4, 2), (4, 400))]
    on = small_machines(num_blocks=400)
    figures = run("fcfs", on.config(), requests, on, Target()).figures
    assert figures.not_done == 1
    assert figures.output_tokens < 402


def test_lanes_that_an_overload_pauses_go_on_by_themselves() -> None:
    """For some seconds more comes than can be done: the batch lane waits for its turn, and all is done in the end."""
    arrivals = [replace(arrival, at_s=index / 250) for index, arrival in enumerate(burst(500, output_tokens=(20, 60)))]
    requests = mixed(arrivals, Mix(lanes=(10, 50, 40)))
    on = small_machines(num_blocks=250, seqs=8)
    overload = OverloadConfig(ttft_target_s=0.5, queue_delay_s=0.5, hold_s=0.2, recovery_s=0.5)
    simulation, measures = played(requests, on, replace(on.config(), overload=overload))
    assert simulation.core.counters.overload_changes > 1
    assert measures.done.all()


def test_a_request_that_no_executor_can_hold_is_not_done() -> None:
    on = small_machines(num_blocks=8)
    figures = run("fcfs", on.config(), together((33, 1), (4, 2)), on, Target()).figures
    assert (figures.not_done, figures.output_tokens) == (1, 2)


def test_load_beyond_capacity_queues() -> None:
    on = small_machines(num_blocks=400, seqs=8)
    queues = [
        run("fcfs", on.config(), mixed(at_rate(burst_times(60), rate)), on, Target()).figures.queue_max for rate in (5.0, 500.0)
    ]
    assert queues[0] <= 2
    assert queues[1] > 30


def burst_times(count: int) -> list[Arrival]:
    return [replace(arrival, at_s=float(index)) for index, arrival in enumerate(burst(count))]
