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
# Before anything is measured: memory that is touched for the first time takes its time.
WARM_UP = (Arrival(0.0, 4096, 8),) * 3
# About what each part of a calibration takes.
_DECODING_S, _JOINING_S = 2.0, 4.0
CALIBRATING, WARMING_UP = "calibration", "warm-up"


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
        return self.name not in (CALIBRATING, WARMING_UP)


def calibration(requests: int = 24) -> tuple[Arrival, ...]:
    """What none of the loads has, in three parts, `requests` in each of the last two.

    Eight short prompts whose outputs end one after the other, for decodes of each number. Then prompts of 8 to 128 tokens, one
    every so often, that join four which decode. Then prompts of 8 to 4,096 tokens that find the service idle, half busy and full.
    Lengths are even by their logarithms.
    """
    draw = Random(SEED)
    together = [Arrival(0.0, 16 * (number + 1), 16 * (number + 1)) for number in range(8)]
    decoding = [Arrival(_DECODING_S, 32, 256)] * 4
    joining = [
        Arrival(_DECODING_S + _JOINING_S * (number + 1) / requests, length, draw.randint(2, 12))
        for number, length in enumerate(_lengths(8, 128, requests, draw))
    ]
    lengths = _lengths(8, 4096, requests, draw)
    spread = poisson([Arrival(0.0, length, draw.randint(16, 64)) for length in lengths], rate=1.5, seed=SEED)
    last = [replace(arrival, at_s=_DECODING_S + _JOINING_S + arrival.at_s) for arrival in spread]
    return (*together, *decoding, *joining, *last)


def _lengths(least: int, most: int, count: int, draw: Random) -> list[int]:
    lengths = [round(length) for length in np.geomspace(least, most, count)]
    draw.shuffle(lengths)
    return lengths


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
        await self.measure(CALIBRATING, calibration())
