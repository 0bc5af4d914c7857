"""A recorded service played again: the fitted cost is the true one, and the prediction of what was is what was."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tokenmill_scheduler.core.effects import Effect
from tokenmill_scheduler.core.events import Cancelled, Event, Submitted, Tick
from tokenmill_scheduler.core.scheduler import Scheduler, SchedulerConfig
from tokenmill_simulator.compare import run
from tokenmill_simulator.figures import Target
from tokenmill_simulator.measures import Measures
from tokenmill_simulator.recording import Recording
from tokenmill_simulator.requests import SimulatedRequest, mixed
from tokenmill_simulator.simulation import Simulation
from tokenmill_workloads import Arrival, at_rate, burst

from tests.unit.simulator.loads import COST, burst_of, small_machines

LATER_S = 1_700_000_000.0


class RecordedScheduler(Scheduler):
    """Its clock is Unix time, as a real one's."""

    def __init__(self, config: SchedulerConfig, recording: Recording) -> None:
        super().__init__(config)
        self._recording = recording
        self.seen: list[tuple[float, Event, list[Effect]]] = []

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        effects = super().handle(event, now_s)
        self.seen.append((LATER_S + now_s, _later(event), effects))
        self._recording.saw(*self.seen[-1], self.num_waiting)
        return effects


def _later(event: Event) -> Event:
    if not isinstance(event, Submitted):
        return event
    times = ("arrival_s", "deadline_s", "queue_deadline_s")
    known = {name: time_s for name in times if (time_s := getattr(event.request, name)) is not None}
    return replace(event, request=replace(event.request, **{name: LATER_S + time_s for name, time_s in known.items()}))


def recorded(requests: list[SimulatedRequest], seqs: int = 4) -> tuple[Recording, RecordedScheduler]:
    on = small_machines(num_blocks=2000, seqs=seqs)
    recording = Recording()
    simulation = Simulation(on.config(), requests, on.executors, on.cost, Measures(requests))
    simulation.core = core = RecordedScheduler(on.config(), recording)
    simulation.run()
    return recording, core


def test_the_prediction_of_what_was_is_what_was() -> None:
    recording, core = recorded(mixed(at_rate(burst(40), 30)))
    config = core.config
    measured = recording.run(config, core.counters, Target()).figures
    predicted = run("again", config, recording.requests(), recording.machines(), Target()).figures
    assert predicted.output_tokens == measured.output_tokens
    for figure in ("wall_s", "output_tokens_per_s", "occupancy"):
        assert getattr(predicted, figure) == pytest.approx(getattr(measured, figure), rel=0.02)
    for spread in ("time_to_first_token_s", "inter_token_s", "latency_s"):
        assert getattr(predicted, spread).p50 == pytest.approx(getattr(measured, spread).p50, rel=0.05)


def _with_impatient_clients() -> list[SimulatedRequest]:
    """On one slot: 0 is done, 1 leaves while it waits, 2 leaves while it runs, 3 is done, 4 expires, and 5 waits in vain."""
    at = [SimulatedRequest(Arrival(0.001 * number, 8, 100), max_tokens=1_000) for number in range(6)]
    return [
        at[0],
        replace(at[1], leaves_s=0.05),
        replace(at[2], leaves_s=0.2),
        at[3],
        replace(at[4], deadline_s=0.4),
        replace(at[5], queue_timeout_s=0.1),
    ]


def test_who_left_or_expired_does_so_again_and_is_not_done() -> None:
    recording, core = recorded(_with_impatient_clients(), seqs=1)
    config = core.config
    measured = recording.run(config, core.counters, Target())
    assert measured.measures.done.tolist() == [True, False, False, True, False, False]
    again = run("again", config, recording.requests(), recording.machines(), Target())
    assert again.measures.done.tolist() == measured.measures.done.tolist()
    assert again.measures.tokens == pytest.approx(measured.measures.tokens, abs=2)
    assert measured.measures.tokens[1] == measured.measures.tokens[5] == 0 < measured.measures.tokens[2] < 100


def test_with_more_slots_who_left_the_queue_has_tokens_by_then() -> None:
    """Nobody knows how many it would have made, so it goes on until its client leaves; where there is none to leave, to its end."""
    recording, core = recorded(_with_impatient_clients(), seqs=1)
    config = replace(core.config, max_num_seqs=6)
    wider = run("wider", config, recording.requests(), recording.machines(), Target()).measures
    assert wider.done.tolist() == [True, False, False, True, False, True]
    assert (wider.tokens[[1, 2, 4]] > 0).all()
    assert wider.tokens[5] == 1_000
    assert wider.ended_s[1] == pytest.approx(wider.arrival_s[1] + 0.05, abs=1e-3)


def test_who_is_not_done_when_the_recording_ends_leaves_then() -> None:
    recording, core = recorded(_with_impatient_clients(), seqs=1)
    cut = Recording()
    for at_s, event, effects in core.seen:
        if at_s < LATER_S + 0.05:
            cut.saw(at_s, event, effects, 0)
    requests = cut.requests()
    assert [request.leaves_s is None for request in requests] == [False] * 6
    again = run("again", core.config, requests, recording.machines(), Target())
    assert not again.measures.done.any()
    assert again.figures.wall_s == pytest.approx(0.05, abs=0.01)


def test_the_fitted_cost_is_the_true_one() -> None:
    recording, _ = recorded(burst_of(30))
    fitted = recording.fit()
    assert fitted.error < 0.01
    assert fitted.cost.step_s == pytest.approx(COST.step_s, rel=0.05)
    assert fitted.cost.row_s == pytest.approx(COST.row_s, rel=0.1)


def test_an_empty_recording_has_nothing_to_simulate() -> None:
    recording = Recording()
    recording.saw(1.0, Tick(), [], 0)
    recording.saw(1.0, Cancelled("unknown", "a test"), [], 0)
    for ask in (recording.requests, recording.machines, recording.fit):
        with pytest.raises(ValueError, match=r"recorded|known"):
            ask()
