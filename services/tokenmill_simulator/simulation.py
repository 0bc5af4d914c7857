"""The production core under a virtual clock: requests go in, model executors answer its plans, what clients would see comes out.

The loop is that of the service. All events of one instant go into the core, then every plan that is due is asked for; the next plan
of an executor is due a lead before the one ahead of it ends, and up to `pipeline_depth` are out. Reading and writing clients, the
ledger and the core's own time are not modelled. Must not know: workloads, policies, how figures are shown.
"""

from __future__ import annotations

import gc
import heapq
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from tokenmill_scheduler.core.effects import Effect, PlanIssued
from tokenmill_scheduler.core.events import Event, ExecutorJoined, PlanDue, ResultArrived, Tick
from tokenmill_scheduler.core.plans import Blocks, ExecutorDescription, Plan, Result
from tokenmill_scheduler.core.scheduler import Scheduler, SchedulerConfig

from tokenmill_simulator.cost import UNMEASURED, ServiceCost, StepCost
from tokenmill_simulator.entrance import Admittance, Entrance, Refusals
from tokenmill_simulator.executor import ModelExecutor, has_prefill
from tokenmill_simulator.requests import SimulatedRequest

EVERYBODY = Admittance()
# As in the service: a wake-up that has passed already is not looked at in a busy loop.
_MIN_WAKEUP_S = 0.005


class Observer(Refusals, Protocol):
    """Sees what happens, as it happens."""

    def happened(self, effects: list[Effect], now_s: float) -> None: ...

    def stepped(self, step: Step) -> None: ...


@dataclass(frozen=True, slots=True)
class Step:
    """One plan that an executor has carried out, from `start_s` to `end_s`; `waiting` requests were queued when it was planned."""

    executor: int
    start_s: float
    end_s: float
    sequences: int
    blocks: Blocks
    waiting: int


class _Drive:
    """One executor as it is driven: its steps one after the other, and when its next plan is due."""

    def __init__(self, index: int, executor: ModelExecutor, service: ServiceCost) -> None:
        self.service = service
        self.index = index
        self.executor = executor
        self.name = executor.description.name
        self.plans_out = 0
        self.asking_s = -1.0
        self._end_s = self._lead_s = 0.0

    def due_s(self, now_s: float) -> float:
        """When the next plan is to be asked for."""
        return now_s if self.plans_out == 0 else max(now_s, self._end_s - self._lead_s)

    def send(self, plan: Plan, now_s: float) -> tuple[float, float, Result]:
        """Carries out the plan once the steps before it are over; when it starts, when it ends, the answer."""
        result, seconds = self.executor.step(plan)
        start_s = max(self._end_s, now_s + self.service.link_s)
        self._end_s = start_s + seconds
        self._lead_s = self.service.lead_of(seconds, has_prefill(plan))
        self.plans_out += 1
        return start_s, self._end_s, result


class Simulation:
    """One run of `requests`, in the order of their arrival, over executors that are all alike. Use once."""

    def __init__(
        self,
        config: SchedulerConfig,
        requests: Sequence[SimulatedRequest],
        executors: Sequence[ExecutorDescription],
        cost: StepCost,
        observer: Observer,
        before: Sequence[Event] = (),
        admittance: Admittance = EVERYBODY,
        service: ServiceCost = UNMEASURED,
    ) -> None:
        """`before`: events that the core is given first. What the `service` adds at its clients is left out here.

        Raises KeyError for a policy or batching mode that the core does not have.
        """
        self.core = Scheduler(config)
        self.now_s = 0.0
        self._entrance = Entrance(self.core, executors[0].model, requests, admittance, observer)
        self._observer = observer
        self._before = before
        output_tokens = [request.arrival.output_tokens for request in requests]
        self.executors = [ModelExecutor(description, cost, output_tokens) for description in executors]
        self._drives = [_Drive(index, executor, service) for index, executor in enumerate(self.executors)]
        # Results on their way, and times to look again; the count settles ties.
        self._heap: list[tuple[float, int, _Drive | None, Result | None, Step | None]] = []
        self._count = 0
        self._wakeup_s = -1.0

    def run(self) -> None:
        """To the end of the last request."""
        for event in self._before:
            self._handle(event)
        for executor in self.executors:
            self._handle(ExecutorJoined(executor.description, 1, executor.cache.blocks()))
        with _rare_collections():
            while (instant_s := self._next_instant()) is not None:
                self.now_s = max(self.now_s, instant_s)
                self._take_in()
                self._pump()

    def _next_instant(self) -> float | None:
        times = (self._heap[0][0] if self._heap else None, self._entrance.next_s())
        return min((time_s for time_s in times if time_s is not None), default=None)

    def _take_in(self) -> None:
        """Everything that has come by now: results first, as they were on their way before."""
        while self._heap and self._heap[0][0] <= self.now_s:
            _, _, drive, result, step = heapq.heappop(self._heap)
            if drive is not None and result is not None and step is not None:
                drive.plans_out -= 1
                self._handle(ResultArrived(drive.name, result))
                self._observer.stepped(step)
        for event in self._entrance.due(self.now_s):
            self._handle(event)

    def _handle(self, event: Event) -> list[Effect]:
        effects = self.core.handle(event, self.now_s)
        if effects:
            self._observer.happened(effects, self.now_s)
        return effects

    # ---- planning --------------------------------------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Asks for every plan that is due, and comes back when the next one will be, or when time alone matters."""
        wakeup_s = self.core.next_wakeup_s()
        if wakeup_s is not None and wakeup_s <= self.now_s:
            self._handle(Tick())
        for drive in self._drives:
            self._plan(drive)
        wakeup_s = self.core.next_wakeup_s()
        if wakeup_s is not None and wakeup_s != self._wakeup_s:
            self._wakeup_s = wakeup_s
            self._look_again(max(wakeup_s, self.now_s + (_MIN_WAKEUP_S if wakeup_s <= self.now_s else 0.0)))

    def _plan(self, drive: _Drive) -> None:
        while drive.plans_out < drive.executor.description.pipeline_depth:
            due_s = drive.due_s(self.now_s)
            if due_s > self.now_s:
                if due_s != drive.asking_s:
                    drive.asking_s = due_s
                    self._look_again(due_s)
                return
            issued = [effect for effect in self._handle(PlanDue(drive.name)) if isinstance(effect, PlanIssued)]
            if not issued:
                return
            self._send(drive, issued[0].plan)

    def _send(self, drive: _Drive, plan: Plan) -> None:
        start_s, end_s, result = drive.send(plan, self.now_s)
        step = Step(drive.index, start_s, end_s, len(plan.advance_sequence_ids), result.blocks, self.core.num_waiting)
        self._push(end_s + drive.service.link_s, drive, result, step)

    def _look_again(self, at_s: float) -> None:
        self._push(at_s, None, None, None)

    def _push(self, at_s: float, drive: _Drive | None, result: Result | None, step: Step | None) -> None:
        self._count += 1
        heapq.heappush(self._heap, (at_s, self._count, drive, result, step))


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Steps make little garbage that has cycles, as in the service."""
    before = gc.get_threshold()
    gc.set_threshold(50_000, 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)
