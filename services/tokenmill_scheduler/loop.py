"""The one owner of the core: every event goes in here, every effect is carried out here, on the event loop's thread.

    gRPC ──► desk ─────► Loop ◄──► core           records ──► ledger writer ──► (durable) ──► feeds ──► readers
    executors ◄──► links ◄──┘                     plans ────► links, at once

Plans need no commit and never wait for the disk, but while the writer's backlog is full no new ones are made. Tokens and ends reach
readers only once they are durable: commit, then tell. A failure in here is a bug or a lost lease: the loop stops for good
(`failure`), the process ends, and the next one takes the requests up from the ledger. When plans are asked for is the `Pump`'s,
the way of records the `Recorder`'s. Must not know: protobuf, SQL, what clients see.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import monotonic

import structlog

from tokenmill_scheduler.abandoned import Abandoned
from tokenmill_scheduler.clock import UnixClock
from tokenmill_scheduler.core import events
from tokenmill_scheduler.core.effects import OverloadChanged, PlanIssued
from tokenmill_scheduler.core.events import Event
from tokenmill_scheduler.core.plans import Result
from tokenmill_scheduler.core.request import Request, State
from tokenmill_scheduler.core.scheduler import Scheduler
from tokenmill_scheduler.desk.errors import Unavailable
from tokenmill_scheduler.drive import Drive
from tokenmill_scheduler.idle import IdleClients
from tokenmill_scheduler.ledger.records import Action, Record, StoredOutput
from tokenmill_scheduler.live import LiveRequests, RequestView
from tokenmill_scheduler.metrics import Metrics
from tokenmill_scheduler.pacing import StepShape
from tokenmill_scheduler.pump import Pump
from tokenmill_scheduler.recorder import Recorder, RecordWriter
from tokenmill_scheduler.stops import StopStrings
from tokenmill_scheduler.streams import Feed
from tokenmill_scheduler.tally import Tally
from tokenmill_scheduler.text.model import TextModel

TICK_S = 1.0


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
        """`text_model` gives the text side of a model by name; a result of that model only comes once it is known.

        `self.scheduler` is the core: to be asked, events go through `handle`.
        """
        self.clock = clock or UnixClock()
        self.live = LiveRequests()
        self.scheduler = scheduler
        self.drives: dict[str, Drive] = {}
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ticked_s = self.clock()
        self._metrics = Metrics(scheduler.config.policy)
        self._count = Tally()
        self._pump = Pump(scheduler, self.drives, writer, self.clock, self._apply)
        self._recorder = Recorder(self.live, writer, self._metrics, self._count, self.clock, self._pump.committed, self.fail)
        self._stop_strings = StopStrings(self.live, scheduler.owner, text_model)
        self._abandoned = Abandoned(self.live, orphan_grace_s, idle_clients or IdleClients(0.0))
        self._result_seen = asyncio.Event()
        # Bound here once: an unbound one is bound anew at each call, even of a level that is off.
        self._log = structlog.get_logger(__name__).bind()

    # ---- the main loop ---------------------------------------------------------------------------------------------------------

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
        self._pump.soon()

    def answered(self, drive: Drive, result: Result) -> None:
        """The oldest plan of this executor came back."""
        drive.answered(result, monotonic())
        name = drive.name
        self._count(self._metrics.stepped, name, self.scheduler.max_num_seqs(name), result, drive.pacer.last_round_trip_s)
        self._apply(events.ResultArrived(name, result, self._stop_strings.judge(name, result)))
        self._result_seen.set()
        # The executor may have nothing to do from here on: no waiting for the next turn of the event loop.
        self._pump.run()

    def _apply(self, event: Event, actions: Sequence[Action] = ()) -> bool:
        """True if a plan was issued. Does nothing once the loop has failed."""
        if self.failure.done():
            return False
        try:
            plans: list[PlanIssued] = []
            records: list[Record] = []
            for effect in self.scheduler.handle(event, self.clock()):
                if isinstance(effect, PlanIssued):
                    plans.append(effect)
                elif isinstance(effect, OverloadChanged):
                    self._tell_overload(effect)
                else:
                    records.append(effect)
            for issued in plans:
                self._send(issued)
            if records or actions:
                self._recorder.record([*records, *actions])
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
        drive.pacer.sent(StepShape.of(plan), monotonic(), reaches_end=issued.reaches_end)
        self._log.debug("plan sent", executor=issued.executor, epoch=issued.plan.epoch, plan=issued.plan.plan_id)

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
        executor: str = "",
    ) -> None:
        """Takes up a request of another process from its stored tokens, with further choices of it that wait as it does.

        `feed`: one that readers here have followed it by. `losses`: so many executors it is suspected to have cost.
        `executor`: where it ran.
        """
        self._take_up(request, state, output, feed)
        for choice, choice_feed in further:
            self._take_up(choice, state, StoredOutput(0, ()), choice_feed)
        choices = tuple([choice for choice, _ in further])
        self.handle(events.Submitted(request, output.token_ids, state, choices, losses, executor))

    def _take_up(self, request: Request, state: State, output: StoredOutput, feed: Feed | None) -> None:
        feed = feed or Feed()
        feed.bring_up_to(output.token_ids, output.logprobs)
        now_s = self.clock()
        self.live.add(RequestView(request, state, feed), now_s)
        self._count(self._metrics.take_up, request, state, bool(output.token_ids), now_s)
        if feed.readers:
            self.live.reader_came(request.request_id)

    def record(self, action: Action) -> None:
        """Of what the core knows nothing about."""
        self._recorder.record([action])

    async def durable(self) -> None:
        """Returns once all that has happened so far is durable."""
        commit = self._recorder.last_commit
        if commit is not None and not commit.done():
            await asyncio.wait([commit, self.failure], return_when=asyncio.FIRST_COMPLETED)
            if self.failure.done():
                self.failure.result()

    # ---- executors -------------------------------------------------------------------------------------------------------------

    def joined(self, drive: Drive) -> None:
        self.drives[drive.name] = drive
        self._abandoned.served(self.clock())
        self.handle(events.ExecutorJoined(drive.facts.description, drive.epoch, drive.blocks, drive.stored, drive.facts.epoch))

    def lost(self, drive: Drive, reason: str, lives: bool = False) -> None:
        drive.connected = False
        self._result_seen.set()
        if self._pump.planning:
            self.handle(events.ExecutorLost(drive.name, drive.epoch, reason, lives))

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

    # ---- life ------------------------------------------------------------------------------------------------------------------

    @property
    def metrics(self) -> Metrics:
        """As things stand."""
        self._count.settle()
        return self._metrics

    async def tick(self) -> None:
        """Until cancelled: shows that the loop lives, and ends requests whose clients have gone."""
        while True:
            self.ticked_s = self.clock()
            # What time alone has changed is seen, and plans that it allows are asked for.
            self.handle(events.Tick())
            for end in self._abandoned.ends(self.ticked_s) if self._pump.planning else ():
                self.handle(end)
            await asyncio.sleep(TICK_S)

    def fail(self, error: BaseException) -> None:
        """Stops for good: what is in memory can no longer be trusted, what is in the ledger can."""
        self._pump.planning = False
        if not self.failure.done():
            self.failure.set_exception(error)

    async def stop_planning(self) -> None:
        """No new plans from here on. Returns when the results of all plans out are in."""
        self._pump.planning = False
        while self.busy():
            self._result_seen.clear()
            await self._result_seen.wait()

    def busy(self) -> list[str]:
        """The executors that plans are out to."""
        return [drive.name for drive in self.drives.values() if drive.connected and drive.pacer.plans_out]
