"""A recorded service played again: the fitted cost is the true one, and the prediction of what was is what was."""

from __future__ import annotations

import pytest
from tokenmill_scheduler.core.records import Cancelled, Effect, Event, Tick
from tokenmill_scheduler.core.scheduler import Scheduler, SchedulerConfig
from tokenmill_simulator.compare import run
from tokenmill_simulator.figures import Target
from tokenmill_simulator.measures import Measures
from tokenmill_simulator.recording import Recording
from tokenmill_simulator.requests import SimulatedRequest, mixed
from tokenmill_simulator.simulation import Simulation
from tokenmill_workloads import at_rate, burst

from tests.unit.simulator.loads import COST, burst_of, small_machines

LATER_S = 1_700_000_000.0


class RecordedScheduler(Scheduler):
    """Its clock is Unix time, as a real one's."""

    def __init__(self, config: SchedulerConfig, recording: Recording) -> None:
        super().__init__(config)
        self._recording = recording

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        effects = super().handle(event, now_s)
        self._recording.saw(LATER_S + now_s, event, effects, self.num_waiting)
        return effects


def recorded(requests: list[SimulatedRequest], seqs: int = 4) -> tuple[Recording, Simulation]:
    on = small_machines(num_blocks=200, seqs=seqs)
    recording = Recording()
    simulation = Simulation(on.config(), requests, on.executors, on.cost, Measures(requests))
    simulation.core = RecordedScheduler(on.config(), recording)
    simulation.run()
    return recording, simulation


def test_the_prediction_of_what_was_is_what_was() -> None:
    recording, simulation = recorded(mixed(at_rate(burst(40), 30)))
    config = simulation.core.config
    measured = recording.run(config, simulation.core.counters, Target()).figures
    predicted = run("again", config, recording.requests(), recording.machines(), Target()).figures
    assert predicted.output_tokens == measured.output_tokens
    for figure in ("wall_s", "output_tokens_per_s", "occupancy"):
        assert getattr(predicted, figure) == pytest.approx(getattr(measured, figure), rel=0.02)
    for spread in ("time_to_first_token_s", "inter_token_s", "latency_s"):
        assert getattr(predicted, spread).p50 == pytest.approx(getattr(measured, spread).p50, rel=0.05)


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
