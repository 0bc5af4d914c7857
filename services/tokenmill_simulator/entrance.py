"""Clients come and go: each request as it arrives, refused by the core's own gate or let in; who was refused may come again, who is
let in may leave before the end.

Must not know: executors, what becomes of a request that was let in.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Protocol

from tokenmill_scheduler.core.backlog import QueueLimits
from tokenmill_scheduler.core.events import Cancelled, Submitted
from tokenmill_scheduler.core.gate import Arriving, QueueGate
from tokenmill_scheduler.core.scheduler import Scheduler

from tokenmill_simulator.requests import SimulatedRequest


@dataclass(frozen=True, slots=True)
class Admittance:
    """`limits` None: everybody is let in, whatever the overload. Who is refused comes again, after the delay that it is told, as
    often as `retries` says."""

    limits: QueueLimits | None = None
    retries: int = 0


class Refusals(Protocol):
    def was_refused(self, place: int, for_good: bool) -> None:
        """The request at this place among all."""


class Entrance:
    """`requests` are in the order of their arrival."""

    def __init__(
        self, core: Scheduler, model: str, requests: Sequence[SimulatedRequest], admittance: Admittance, refusals: Refusals
    ) -> None:
        self._gate = None if admittance.limits is None else QueueGate(core, admittance.limits)
        self._model = model
        self._requests = requests
        self._retries = admittance.retries
        self._refusals = refusals
        self._next = 0
        # Those that come again: when, their places, how often they may once more.
        self._again: list[tuple[float, int, int]] = []
        # Those that will leave: when, and their places.
        self._leaving: list[tuple[float, int]] = []

    def next_s(self) -> float | None:
        """When somebody comes or leaves; None: nobody will."""
        times = [self._again[0][0]] if self._again else []
        times += [self._leaving[0][0]] if self._leaving else []
        if self._next < len(self._requests):
            times.append(self._requests[self._next].arrival.at_s)
        return min(times, default=None)

    def due(self, now_s: float) -> Iterator[Submitted | Cancelled]:
        """Of all that have come and gone by now; each is to be handed to the core before the next is asked for."""
        while self._again and self._again[0][0] <= now_s:
            _, place, retries = heapq.heappop(self._again)
            yield from self._let_in(place, retries, now_s)
        while self._next < len(self._requests) and self._requests[self._next].arrival.at_s <= now_s:
            self._next += 1
            yield from self._let_in(self._next - 1, self._retries, now_s)
        while self._leaving and self._leaving[0][0] <= now_s:
            _, place = heapq.heappop(self._leaving)
            yield Cancelled(str(place), "its client left")

    def _let_in(self, place: int, retries: int, now_s: float) -> Iterator[Submitted]:
        simulated = self._requests[place]
        request = simulated.request(place, self._model)
        if retries < self._retries:
            request = replace(request, arrival_s=now_s)
        refusal = None if self._gate is None else self._gate.refuses(request, Arriving(), now_s)
        leaves_s = inf if simulated.leaves_s is None else simulated.arrival.at_s + simulated.leaves_s
        if refusal is None:
            if leaves_s < inf:
                heapq.heappush(self._leaving, (leaves_s, place))
            yield Submitted(request)
            return
        delay_s = refusal.come_again_s if retries else None
        comes_s = inf if delay_s is None else now_s + delay_s
        self._refusals.was_refused(place, for_good=comes_s >= leaves_s)
        if comes_s < leaves_s:
            heapq.heappush(self._again, (comes_s, place, retries - 1))
