"""Workloads sent to one running service, one after the other, and the calibrations between them. Must not know: the simulator."""

from __future__ import annotations

import time
from dataclasses import dataclass
from random import Random

import numpy as np
from rich.console import Console
from tokenmill_cli.bench.runner import WorkloadRun
from tokenmill_cli.bench.session import Server, Spec
from tokenmill_cli.bench.session import measure as bench
from tokenmill_workloads import Arrival, poisson

SEED = 7
# A token each, on the idle service: what a request takes beyond its only step is the service's.
PROBES = tuple(Arrival(0.1 * number, 1, 1) for number in range(20))
# Before anything is measured: memory that is touched for the first time takes its time.
WARM_UP = (Arrival(0.0, 4096, 8),) * 3
PROBING, CALIBRATING, WARMING_UP = "probes", "calibration", "warm-up"


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of the service's life with one workload; the next one begins when it is idle again."""

    name: str
    since_s: float
    arrivals: tuple[Arrival, ...]
    seed: int
    run: WorkloadRun

    @property
    def is_load(self) -> bool:
        return self.name not in (PROBING, CALIBRATING, WARMING_UP)


def calibration(requests: int = 24) -> tuple[Arrival, ...]:
    """Prompts of 8 to 4,096 tokens, evenly by their logarithms, that find the service idle, half busy and full."""
    draw = Random(SEED)
    lengths = [round(length) for length in np.geomspace(8, 4096, requests)]
    draw.shuffle(lengths)
    return poisson([Arrival(0.0, length, draw.randint(16, 64)) for length in lengths], rate=1.5, seed=SEED)


class Measurer:
    """Measures workloads, each with prompts of its own: none is in the prefix cache from before."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.phases: list[Phase] = []

    async def measure(self, name: str, arrivals: tuple[Arrival, ...]) -> None:
        """Raises AssertionError when a request failed."""
        seed, since_s = SEED + len(self.phases), time.time()
        spec = Spec(name, arrivals, rate=None, seed=seed, repeat=1, warmup=0, label="")
        measured = (await bench(self._server, spec, Console(quiet=True))).runs[0]
        assert not measured.failures, measured.failures
        self.phases.append(Phase(name, since_s, arrivals, seed, measured))

    async def calibrate(self) -> None:
        """Two phases."""
        await self.measure(PROBING, PROBES)
        await self.measure(CALIBRATING, calibration())
