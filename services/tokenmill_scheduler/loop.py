"""The one owner of the core: every event goes in here, every effect is carried out here, on the event loop's thread.

    gRPC ──► desk ─────► Loop ◄──► core           records ──► ledger writer ──► (durable) ──► feeds ──► readers
    executors ◄──► links ◄──┘                     plans ────► links, at once

Plans need no commit and never wait for the disk, but while the writer's backlog is full no new ones are made. Tokens and ends reach
readers only once they are durable: commit, then tell. A failure in here is a bug or a lost lease: the loop stops for good
(`failure`), the process ends, and the next one takes the requests up from the ledger.

Must not know: protobuf, SQL, what clients see.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

import structlog

from tokenmill_scheduler.clock import UnixClock
from tokenmill_scheduler.core import events
from tokenmill_scheduler.core.effects import OverloadChanged, PlanIssued, Transitioned
from tokenmill_scheduler.core.events import Event
from tokenmill_scheduler.core.ordering import Ordering
from tokenmill_scheduler.core.plans import ExecutorDescription, Result
from tokenmill_scheduler.core.request import TERMINAL, Request, State
from tokenmill_scheduler.core.scheduler import Scheduler
from tokenmill_scheduler.core.waiting import WaitReason
from tokenmill_scheduler.desk.errors import Unavailable
from tokenmill_scheduler.desk.records import ExecutorStatus, Load
from tokenmill_scheduler.drive import Drive
from tokenmill_scheduler.idle import IdleClients
from tokenmill_scheduler.ledger.errors import LedgerUnavailable
from tokenmill_scheduler.ledger.records import Action, Outcome, Record, StoredOutput, Submission
from tokenmill_scheduler.live import LiveRequests, RequestView
from tokenmill_scheduler.metrics import Metrics
from tokenmill_scheduler.pacing import StepShape
from tokenmill_scheduler.stops import StopStrings
from tokenmill_scheduler.streams import Feed
from tokenmill_scheduler.tally import Tally
from tokenmill_scheduler.text.model import TextModel

TICK_S = 0.25
# A wake-up that has passed already but waits for an executor is not looked at in a busy loop.
MIN_WAKEUP_S = 0.005
# Event loops keep time in milliseconds, and uvloop's short timers end at once: what is due sooner than this is due now.
TIMER_TICK_S = 0.001


class RecordWriter(Protocol):
    """The way to the ledger: `ledger.writer.LedgerWriter` in production. Used on the event loop's thread."""

    @property
    def saturated(self) -> bool:
        """The backlog is at its bound: nothing that makes more records should be started."""

    @property
    def outage(self) -> LedgerUnavailable | None:
        """Why nothing can be written for now."""

    @property
    def backlog(self) -> int: ...

    def append(self, records: Sequence[Record], on_durable: Callable[[list[Outcome]], None] | None = None) -> None:
        """In order; `on_durable` is called once they are durable."""

    async def submit(self, submission: Submission, *beside: Record) -> Outcome:
        """Returns once it is durable, and `beside` with it. Raises LedgerUnavailable, with nothing written."""


class Loop:
    def __init__(
        self,
        scheduler: Scheduler,
        writer: RecordWriter,
        text_model: Callable[[str], TextModel],
        orphan_grace_s: float,
        clock: Callable[[], float] | None = None,
        idle_clients: IdleClients | None = None,
    ) -> None:
        """`text_model` gives the text side of a model by name; a result of that model only comes once it is known."""
        self.clock = clock or UnixClock()
        self.live = LiveRequests()
        self._metrics = Metrics(scheduler.config.policy)
        self._count = Tally()
        self.drives: dict[str, Drive] = {}
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ticked_s = self.clock()
        self._scheduler = scheduler
        self._writer = writer
        self._stop_strings = StopStrings(self.live, scheduler.owner, text_model)
        self._orphan_grace_s = orphan_grace_s
        self._idle_clients = idle_clients or IdleClients(0.0)
        self._planning = True
        self._served_since_s: float | None = None
        self._pump_handle: asyncio.Handle | None = None
        self._pump_is_soon = False
        self._was_saturated = False
        self._result_seen = asyncio.Event()
        self._last_commit: asyncio.Future[None] | None = None
        # Bound here once: an unbound one is bound anew at each call, even of a level that is off.
        self._log = structlog.get_logger(__name__).bind()

    # ---- requests --------------------------------------------------------------------------------------------------------------

    def accept(self, request: Request, *further: Request) -> None:
        """Takes up a request that has just become durable, with all its choices."""
        now_s = self.clock()
        for choice in (request, *further):
            self.live.add(RequestView(choice, State.WAITING, Feed()), now_s)
            self._count(self._metrics.accept, choice, now_s)
        self.handle(events.Submitted(request, choices=further))

    def resume(
        self,
        request: Request,
        state: State,
        output: StoredOutput,
        feed: Feed | None = None,
        further: Sequence[tuple[Request, Feed | None]] = (),
        losses: int = 0,
    ) -> None:
        """Takes up a request of another process from its stored tokens, with further choices of it that wait as it does.

        `feed`: one that readers here have followed it by. `losses`: so many executors it is suspected to have cost.
        """
        self._take_up(request, state, output, feed)
        for choice, choice_feed in further:
            self._take_up(choice, state, StoredOutput(0, ()), choice_feed)
        self.handle(events.Submitted(request, output.token_ids, state, tuple([choice for choice, _ in further]), losses))

    def _take_up(self, request: Request, state: State, output: StoredOutput, feed: Feed | None) -> None:
        feed = feed or Feed()
        feed.bring_up_to(output.token_ids, output.logprobs)
        now_s = self.clock()
        self.live.add(RequestView(request, state, feed), now_s)
        self._count(self._metrics.take_up, request, state, bool(output.token_ids), now_s)
        if feed.readers:
            self.live.reader_came(request.request_id)

    def handle(self, event: Event, *actions: Action) -> None:
        """One event through the core; its effects are under way on return, and a plan that they make possible is soon asked for.

        `actions` become durable together with what the event leads to.
        """
        if isinstance(event, events.PolicyChanged):
            self._count(self._metrics.use_policy, event.policy)
        self._apply(event, actions)
        if not isinstance(event, events.Tick):
            for drive in self.drives.values():
                drive.pacer.hurry()
        self._pump_soon()

    def record(self, action: Action) -> None:
        """Of what the core knows nothing about."""
        self._record([action])

    async def durable(self) -> None:
        """Returns once all that has happened so far is durable."""
        if self._last_commit is not None and not self._last_commit.done():
            await asyncio.wait([self._last_commit, self.failure], return_when=asyncio.FIRST_COMPLETED)
            if self.failure.done():
                self.failure.result()

    # ---- executors -------------------------------------------------------------------------------------------------------------

    def joined(self, drive: Drive) -> None:
        self.drives[drive.name] = drive
        if self._served_since_s is None:
            self._served_since_s = self.clock()
        self.handle(events.ExecutorJoined(drive.facts.description, drive.epoch, drive.blocks, drive.stored, drive.facts.epoch))

    def answered(self, drive: Drive, result: Result) -> None:
        drive.answered(result, _now())
        name = drive.name
        self._count(self._metrics.stepped, name, self._scheduler.max_num_seqs(name), result, drive.pacer.last_round_trip_s)
        self._apply(events.ResultArrived(name, result, self._stop_strings.judge(name, result)))
        self._result_seen.set()
        # The executor may have nothing to do from here on: no waiting for the next turn of the event loop.
        self._pump()

    def lost(self, drive: Drive, reason: str, lives: bool = False) -> None:
        drive.connected = False
        self._result_seen.set()
        if self._planning:
            self.handle(events.ExecutorLost(drive.name, drive.epoch, reason, lives))

    def connected(self) -> dict[tuple[str, int], ExecutorDescription]:
        """By name and epoch: what the executors that are there can hold of what is planned for here."""
        drives = [drive for drive in self.drives.values() if drive.connected]
        return {
            (drive.name, drive.epoch): replace(drive.facts.description, max_num_seqs=self._scheduler.max_num_seqs(drive.name))
            for drive in drives
        }

    def hand_over(self, request_ids: tuple[str, ...]) -> None:
        """Requests that wait are to be another scheduler's. Nothing happens to them here any more; they are `forget`'s once that
        is durable, or not to be."""
        self.live.leave(request_ids)
        self.handle(events.HandedOver(request_ids))

    def forget(self, request_ids: Sequence[str], reason: Unavailable) -> None:
        """Requests that are another scheduler's; who reads them here is told `reason`."""
        for request_id in request_ids:
            self.live.forget(request_id, reason)
            self._count(self._metrics.forget, request_id)

    # ---- what there is to see --------------------------------------------------------------------------------------------------

    @property
    def ordering(self) -> Ordering:
        """Who runs sooner, as it is now."""
        return self._scheduler.ordering

    def wait_reason(self, request_id: str) -> str:
        return self._scheduler.wait_reason(request_id)

    def why_waits(self, request_id: str) -> WaitReason | None:
        """None if it does not wait."""
        return self._scheduler.why_waits(request_id)

    @property
    def metrics(self) -> Metrics:
        """As things stand."""
        self._count.settle()
        return self._metrics

    def load(self) -> Load:
        scheduler, counters = self._scheduler, self._scheduler.counters
        running = scheduler.running_by_lane()
        return Load(
            num_requests_running=sum(running.values()),
            num_requests_waiting=scheduler.num_waiting,
            max_num_seqs=scheduler.config.max_num_seqs,
            max_num_batched_tokens=scheduler.config.max_num_batched_tokens,
            kv_cache_usage=scheduler.kv_cache_usage,
            batch_occupancy=counters.occupancy_sum / counters.steps if counters.steps else 0.0,
            preemptions=counters.preemptions,
            output_tokens=counters.output_tokens,
            prompt_tokens=counters.prompt_tokens,
            steps=counters.steps,
            stale_results=counters.stale_results,
            no_blocks=counters.no_blocks,
            prefix_cache_queries=counters.prefix_cache_queries,
            prefix_cache_hits=counters.prefix_cache_hits,
            ledger_backlog=self._writer.backlog,
            batching=scheduler.config.batching,
            policy=scheduler.ordering.policy.name,
            queue_paused=scheduler.paused,
            wait_reasons=scheduler.wait_reasons(),
            recomputed_tokens=counters.recomputed_tokens,
            queued_tokens=scheduler.num_queued_tokens,
            overload_stage=scheduler.overload_stage,
            overload_reason=scheduler.overload_why,
            overload_changes=counters.overload_changes,
            lanes=self.metrics.lane_loads(running, self.clock()),
            time_to_first_token=self.metrics.time_to_first_token.total(),
            inter_token_latency=self.metrics.inter_token.total(),
            request_queue_time=self.metrics.queue_time.total(),
            batch_occupancy_sum=counters.occupancy_sum,
            streams_open=self.live.num_readers,
            finished={str(reason): count for reason, count in self.metrics.finished.items()},
        )

    def executors(self) -> tuple[ExecutorStatus, ...]:
        """In the order they first joined, lost ones among them."""
        return tuple(self.drives[view.name].status(view.running, view.drained, _now()) for view in self._scheduler.executors())

    @property
    def scheduler(self) -> Scheduler:
        """To be asked; events go through `handle`."""
        return self._scheduler

    # ---- life ------------------------------------------------------------------------------------------------------------------

    async def tick(self) -> None:
        """Until cancelled: shows that the loop lives, and cancels requests whose client never came back."""
        while True:
            self.ticked_s = self.clock()
            # What time alone has changed is seen, and plans that it allows are asked for.
            self.handle(events.Tick())
            for request_id in self._orphans():
                self.handle(events.Cancelled(request_id, "its client did not come back"))
            for request_id in self._idle_clients.find(self.live.attended, self.ticked_s) if self._planning else ():
                self.handle(events.Expired(request_id, self._idle_clients.reason))
            await asyncio.sleep(TICK_S)

    def _orphans(self) -> list[str]:
        """Requests whose grace is over. It runs while clients can attach: not before the first executor has brought a model."""
        before_s = self.ticked_s - self._orphan_grace_s
        if not self._planning or self._served_since_s is None or self._served_since_s >= before_s:
            return []
        return self.live.orphans_since(before_s)

    def fail(self, error: BaseException) -> None:
        """Stops for good: what is in memory can no longer be trusted, what is in the ledger can."""
        self._planning = False
        if not self.failure.done():
            self.failure.set_exception(error)

    async def stop_planning(self) -> None:
        """No new plans from here on. Returns when the results of all plans out are in."""
        self._planning = False
        while any(drive.connected and drive.pacer.plans_out for drive in self.drives.values()):
            self._result_seen.clear()
            await self._result_seen.wait()

    # ---- carrying out ----------------------------------------------------------------------------------------------------------

    def _apply(self, event: Event, actions: Sequence[Action] = ()) -> bool:
        """True if a plan was issued. Does nothing once the loop has failed."""
        if self.failure.done():
            return False
        try:
            plans: list[PlanIssued] = []
            records: list[Record] = []
            for effect in self._scheduler.handle(event, self.clock()):
                if isinstance(effect, PlanIssued):
                    plans.append(effect)
                elif isinstance(effect, OverloadChanged):
                    self._tell_overload(effect)
                else:
                    records.append(effect)
            for issued in plans:
                self._send(issued)
            if records or actions:
                self._record([*records, *actions])
        except Exception as error:
            self.fail(error)
            raise
        return bool(plans)

    def _tell_overload(self, change: OverloadChanged) -> None:
        rises = change.after > change.before
        log = self._log.warning if rises else self._log.info
        reason = change.why if rises else "the load has fallen"
        log("overload stage changed", before=change.before, stage=change.after, reason=reason)

    def _send(self, issued: PlanIssued) -> None:
        drive = self.drives[issued.executor]
        plan = replace(issued.plan, after_all_steps=True) if drive.pacer.lets_finish else issued.plan
        drive.link.send(plan)
        drive.pacer.sent(StepShape.of(plan), _now())
        self._log.debug("plan sent", executor=issued.executor, epoch=issued.plan.epoch, plan=issued.plan.plan_id)

    def _record(self, records: Sequence[Record]) -> None:
        self.live.happened(records)
        if moves := [record for record in records if isinstance(record, Transitioned)]:
            self._count(self._metrics.moved, moves)
            self._log_moves(moves)
        self._last_commit = commit = asyncio.get_running_loop().create_future()
        self._writer.append(records, partial(self._committed, records, self.clock(), commit))

    def _committed(
        self, records: Sequence[Record], handed_over_s: float, commit: asyncio.Future[None], outcomes: list[Outcome]
    ) -> None:
        try:
            self.live.committed(records)
            self._count(self._metrics.committed, records, handed_over_s, self.clock())
        except Exception as error:
            self.fail(error)
            raise
        commit.set_result(None)
        if self._was_saturated:
            self._pump_soon()

    def _log_moves(self, moves: Sequence[Transitioned]) -> None:
        for record in moves:
            if record.after in TERMINAL or record.after is State.PREEMPTED:
                log = self._log.warning if record.after is State.FAILED else self._log.info
                log(
                    f"request {record.after}",
                    request_id=record.request_id,
                    reason=record.error or record.reason or record.finish_reason,
                    executor=record.executor,
                )

    # ---- planning --------------------------------------------------------------------------------------------------------------

    def _pump_soon(self) -> None:
        """Asks for plans once the events of this turn of the event loop are all in."""
        if not self._pump_is_soon:
            self._set_pump(asyncio.get_running_loop().call_soon(self._pump))
            self._pump_is_soon = True

    def _set_pump(self, handle: asyncio.Handle | None) -> None:
        if self._pump_handle is not None:
            self._pump_handle.cancel()
        self._pump_handle = handle
        self._pump_is_soon = False

    def _pump(self) -> None:
        """Asks the core for every plan that is due, and comes back when the next one will be, or when time alone matters."""
        self._set_pump(None)
        if not self._planning:
            return
        times_s = []
        self._was_saturated = self._writer.saturated
        if not self._was_saturated:
            times_s = [due_s for drive in self.drives.values() if (due_s := self._plan(drive)) is not None]
        wait_s = self._until_wakeup()
        if wait_s is not None and wait_s <= 0:
            # No plan was asked for, which sees to the same.
            self._apply(events.Tick())
            wait_s = self._until_wakeup()
        if wait_s is not None:
            times_s.append(_now() + max(wait_s, MIN_WAKEUP_S))
        if times_s:
            self._set_pump(asyncio.get_running_loop().call_later(min(times_s) - _now(), self._pump))

    def _plan(self, drive: Drive) -> float | None:
        """Issues what is due at this executor; returns when to ask again, None if only an event can change that."""
        while drive.connected and (due_s := drive.pacer.due_s(now_s := _now())) is not None:
            if due_s > now_s + TIMER_TICK_S:
                return due_s
            if not self._apply(events.PlanDue(drive.name, drive.pacer.most_steps())):
                drive.pacer.declined()
                return None
        return None

    def _until_wakeup(self) -> float | None:
        wakeup_s = self._scheduler.next_wakeup_s()
        return None if wakeup_s is None else wakeup_s - self.clock()


def _now() -> float:
    # Not the event loop's, which may be that of the start of its turn, and in whole milliseconds.
    return time.monotonic()
