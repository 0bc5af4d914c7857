"""What the plan journal says of each phase: the cost of its steps, and by that what other arrivals would come to."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import astuple, replace
from pathlib import Path
from statistics import fmean, median

from tokenmill_scheduler.core.effects import Effect
from tokenmill_scheduler.core.events import Event, ExecutorJoined
from tokenmill_scheduler.core.scheduler import Scheduler, SchedulerConfig
from tokenmill_scheduler.journal.replay import replay
from tokenmill_simulator.compare import Machines, Run, run
from tokenmill_simulator.cost import ServiceCost, StepCost
from tokenmill_simulator.figures import Target
from tokenmill_simulator.fit import Fit, fit
from tokenmill_simulator.recording import Recording
from tokenmill_simulator.requests import SimulatedRequest
from tokenmill_workloads import Arrival, at_rate, prompts

from benchmarks.prediction.measuring import SEED, Phase


class Recorded:
    """Phases are named by their places. A calibration is foretold nothing: it is what the rest is foretold by."""

    def __init__(self, journal: Path, phases: Sequence[Phase], vocab_size: int) -> None:
        """Raises AssertionError for a journal with gaps."""
        self.phases = tuple(phases)
        self._vocab_size = vocab_size
        self._recordings = [Recording() for _ in phases]
        begins_s = [phase.since_s for phase in phases]

        def saw(core: Scheduler, at_s: float, event: Event, effects: list[Effect]) -> None:
            place = max(0, bisect_right(begins_s, at_s) - 1)
            # The executor is there all along.
            for recording in self._recordings if isinstance(event, ExecutorJoined) else [self._recordings[place]]:
                recording.saw(at_s, event, effects, core.num_waiting)

        replayed = replay(journal, saw)
        assert replayed.difference is None, "the core decides otherwise than its journal says"
        assert not replayed.missing, "the journal has a gap"
        self._config: SchedulerConfig = replayed.config

    def fit(self, calibrations: Sequence[int]) -> Fit:
        """A step's cost, by all steps of these phases."""
        each = [self._recordings[place].measured_steps for place in calibrations]
        return fit([load for loads, _ in each for load in loads], [step_s for _, seconds in each for step_s in seconds])

    def machines(self, calibrations: Sequence[int]) -> Machines:
        """By these phases."""
        each = [self._recordings[place].machines() for place in calibrations]
        service = ServiceCost(*map(fmean, zip(*[astuple(machines.service) for machines in each], strict=True)))
        client_s = median([beside_s for place in calibrations for beside_s in self._beside_core_s(place)])
        return replace(each[0], cost=self.fit(calibrations).cost, service=replace(service, client_s=client_s))

    def client_s(self, place: int) -> float:
        """What lay between client and core in a phase."""
        return median(self._beside_core_s(place))

    def _beside_core_s(self, place: int) -> list[float]:
        """Of each request, what its client waited for the first token beyond what the core says."""
        phase, core = self.phases[place], self._recordings[place].measures()
        waited_s = dict(zip([request.prompt for request in core.requests], core.first_token_s - core.arrival_s, strict=True))
        sent = prompts(phase.arrivals, self._vocab_size, phase.seed)
        timings = phase.run.timings
        return [timing.time_to_first_token_s - waited_s[prompt] for prompt, timing in zip(sent, timings, strict=True)]

    def steps_share(self, place: int, machines: Machines) -> float:
        """What these machines would take for the steps of a phase over what they took."""
        loads, seconds = self._recordings[place].measured_steps
        return sum(map(machines.cost.seconds, loads)) / sum(seconds)

    def as_fast_as(self, place: int, machines: Machines) -> Machines:
        """The same, all their steps longer or shorter by one factor, so that together they take what those of a phase took."""
        share = self.steps_share(place, machines)
        return replace(machines, cost=StepCost(*[term_s / share for term_s in astuple(machines.cost)]))

    def run(self, arrivals: Sequence[Arrival], machines: Machines, seed: int) -> Run:
        """Under the service's own settings, and with the very prompts that were sent."""
        drawn = prompts(arrivals, self._vocab_size, seed)
        requests = [SimulatedRequest(arrival, prompt) for arrival, prompt in zip(arrivals, drawn, strict=True)]
        return run("foretold", self._config, requests, machines, Target())

    def at_load(self, arrivals: tuple[Arrival, ...], load: float) -> tuple[Arrival, ...]:
        """Brought to `load` times the rate at which they would be served if all came at once, by the last calibration.

        A burst stays one.
        """
        if not any(arrival.at_s for arrival in arrivals):
            return arrivals
        together = [replace(arrival, at_s=0.0) for arrival in arrivals]
        fastest = self.run(together, self.machines([len(self.phases) - 1]), SEED).figures.requests_per_s
        return at_rate(arrivals, load * fastest)
