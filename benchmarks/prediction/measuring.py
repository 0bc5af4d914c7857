"""Workloads sent to one running service, one after the other, and the calibrations between them. Must not know: the simulator."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, replace
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
# About what those that only decode take before others join them.
_DECODING_S = 2.0
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
    """Eight short prompts whose outputs end one after the other, for decodes of each number; then prompts of 8 to 4,096 tokens,
    evenly by their logarithms, that find the service idle, half busy and full."""
    draw = Random(SEED)
    together = [Arrival(0.0, 16 * (number + 1), 16 * (number + 1)) for number in range(8)]
    lengths = [round(length) for length in np.geomspace(8, 4096, requests)]
    draw.shuffle(lengths)
    spread = poisson([Arrival(0.0, length, draw.randint(16, 64)) for length in lengths], rate=1.5, seed=SEED)
    return (*together, *[replace(arrival, at_s=_DECODING_S + arrival.at_s) for arrival in spread])


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
        print(f"{name}: {measured.wall_s:.0f} s", file=sys.stderr)
        self.phases.append(Phase(name, since_s, arrivals, seed, measured))

    async def calibrate(self) -> None:
        """Two phases."""
        await self.measure(PROBING, PROBES)
        await self.measure(CALIBRATING, calibration())
