"""Makes one plan for one executor. The main loop of continuous batching is `Planner.plan`.

    relieve    a decode needs a block and none is to be had → one victim is preempted
    displace   a waiting request outranks a running one and lacks its slot or its blocks → that one is preempted (`displacement.py`)
    advance    running sequences: every decode, then prefills in order of admission
    admit      from the queue, in its order (`lineup.py`), while tokens, slots and blocks last
    repeat     where all that is left is to decode: the same step again and again, until another plan comes

Every sequence is advanced on its planned figures (see `sequence.py`), every block is counted against the forecast (`forecast.py`).
Must not know: how results are read, deadlines, where plans are sent.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tokenmill_scheduler.core import forks, quarantine
from tokenmill_scheduler.core.batching import Batching
from tokenmill_scheduler.core.counters import Preemption
from tokenmill_scheduler.core.displacement import Displacement, last_in_order
from tokenmill_scheduler.core.executor import ExecutorState, PlanOut
from tokenmill_scheduler.core.forecast import Forecast
from tokenmill_scheduler.core.lineup import Lineup
from tokenmill_scheduler.core.live import RESOURCE_EXHAUSTED, Ending, LiveRequest
from tokenmill_scheduler.core.ordering import Ordering
from tokenmill_scheduler.core.plans import Admission, Plan
from tokenmill_scheduler.core.queue import WaitingQueue
from tokenmill_scheduler.core.quotas import QuotaCheck
from tokenmill_scheduler.core.request import FinishReason, Lane, State
from tokenmill_scheduler.core.room import Room
from tokenmill_scheduler.core.roster import Roster
from tokenmill_scheduler.core.sequence import Sequence
from tokenmill_scheduler.core.warden import Warden

_OUT_OF_BLOCKS = "out of KV blocks"


@dataclass(slots=True)
class Draft:
    """A plan in the making; `budget` is what is left of its tokens, `only_decodes` that it has no part of a prompt."""

    budget: int
    only_decodes: bool = True
    steps: int = 1
    admissions: list[Admission] = field(default_factory=list)
    sequences: list[Sequence] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)

    def advance(self, sequence: Sequence, count: int) -> None:
        self.budget -= count
        self.sequences.append(sequence)
        self.counts.append(count)
        sequence.plan(count)

    def prefill(self, sequence: Sequence, executor: ExecutorState) -> None:
        """As far as budget and blocks go; the executor hears of it now, if it has not."""
        # Blocks booked for all that is known cover it, but for what windows leave behind: that has to come back first.
        if sequence.planned_computed >= sequence.covered:
            return
        self.only_decodes = False
        if sequence.admission is not None:
            self.admissions.append(forks.introduction(sequence, executor))
        self.advance(sequence, min(sequence.remaining, self.budget, sequence.covered - sequence.planned_computed))


class Planner:
    """`max_overtakes` bounds how often others may pass a request that does not fit."""

    def __init__(self, roster: Roster, batching: Batching, room: Room, warden: Warden, max_overtakes: int) -> None:
        self._roster = roster
        self._batching = batching
        self._room = room
        self._warden = warden
        self._max_overtakes = max_overtakes
        self._displacement = Displacement(roster, batching, room, warden)

    def plan(self, executor: ExecutorState, now_s: float, max_steps: int = 1) -> Plan | None:
        """The next plan, booked; None when there is nothing to release, admit or advance."""
        draft = self._draft(executor, now_s)
        if max_steps > 1 and draft.sequences and draft.only_decodes and _may_repeat(executor):
            self._repeat(executor, draft, max_steps - 1)
        return self._issue(executor, draft)

    def _draft(self, executor: ExecutorState, now_s: float) -> Draft:
        queue = self._roster.queue(executor.description.model)
        draft = Draft(executor.max_num_batched_tokens)
        self._relieve(executor, queue, now_s)
        if self._is_closed(executor) or (self._roster.paused and not queue.num_resuming):
            self._advance(executor, draft)
            return draft
        self._displacement.make_way(executor, queue, now_s)
        # Counted before the advance: a sequence that takes its last step in this plan still has its slot.
        slots = self._batching.open_slots(executor, queue, now_s)
        lineup = self._lineup(executor, queue, now_s) if slots > 0 and len(queue) else None
        self._advance(executor, draft)
        if lineup is not None and draft.budget:
            self._admit(executor, queue.ordering, lineup, draft, slots, now_s)
        return draft

    def _is_closed(self, executor: ExecutorState) -> bool:
        return executor.name in self._roster.drained or quarantine.on_trial(executor)

    # ---- running sequences ----

    def _relieve(self, executor: ExecutorState, queue: WaitingQueue, now_s: float) -> None:
        """Preempts at most one sequence, and none while blocks on their way back cover what decodes lack (C17)."""
        forecast = executor.forecast
        in_need = [s for s in executor.running.values() if _needs_block(s) and forecast.lacking(s)]
        shortage = sum(map(forecast.lacking, in_need)) - forecast.free
        if shortage <= 0:
            return
        outgrown = [s for s in in_need if s.reserved >= executor.description.num_blocks]
        if outgrown:
            # It has every block there is, so it is alone.
            self._outgrow(executor, outgrown[0], now_s)
        elif shortage > executor.blocks_returning:
            victim = last_in_order(executor, queue)
            assert victim is not None, "those in need can be given up themselves"
            self._roster.preempt(victim, now_s, Preemption.OUT_OF_BLOCKS, _OUT_OF_BLOCKS)

    def _outgrow(self, executor: ExecutorState, sequence: Sequence, now_s: float) -> None:
        """A request alone outgrows the pool (C18): it moves to a larger executor, or fails with all tokens of the plans out."""
        live = sequence.live
        assert live is not None
        if sequence.plans_out:
            return
        if self._room.can_be_held(live):
            self._roster.preempt(sequence, now_s, Preemption.OUT_OF_BLOCKS, _OUT_OF_BLOCKS)
        else:
            self._roster.end(live, _too_long(live), now_s)

    def _advance(self, executor: ExecutorState, draft: Draft) -> None:
        """Every decode that has or gets its block, then prefills by what is left of the budget."""
        forecast = executor.forecast
        prefills: list[Sequence] = []
        for sequence in executor.running.values():
            if sequence.planned_known >= sequence.limit or (sequence.may_skip and _may_outrun(sequence, forecast)):
                continue
            if sequence.admission is not None:
                if not forks.waits(sequence, executor):
                    prefills.append(sequence)
                continue
            if sequence.remaining > 1:
                prefills.append(sequence)
                continue
            if sequence.planned_computed >= sequence.covered:
                wanted = forecast.wanted(sequence)
                if wanted > forecast.free:
                    continue
                forecast.reserve(sequence, wanted)
            draft.advance(sequence, 1)
        for sequence in prefills:
            if draft.budget == 0:
                break
            draft.prefill(sequence, executor)

    def _repeat(self, executor: ExecutorState, draft: Draft, most: int) -> None:
        """Lets all of them go on for as many steps as none passes its limit in. While others wait for its slot, a last token is one
        of a plan of its own: no plan cuts that short, so that the slot is free to be planned with (C36)."""
        forecast, others_wait = executor.forecast, len(self._roster.queue(executor.description.model)) > 0
        left = min(sequence.limit - sequence.planned_known for sequence in draft.sequences) - others_wait
        further = min(most, draft.budget // len(draft.sequences), left)
        # Whether a prompt of which much is expected to be cached ends in the plan ahead is not known.
        if further < 1 or any(sequence.predicted for sequence in draft.sequences):
            return
        wanted = [forecast.wanted(sequence, further) for sequence in draft.sequences]
        if sum(wanted) > forecast.free:
            return
        for sequence, blocks in zip(draft.sequences, wanted, strict=True):
            if blocks:
                forecast.reserve(sequence, blocks)
            sequence.go_on(further)
        draft.counts = [1 + further] * len(draft.counts)
        draft.steps += further

    # ---- waiting requests ----

    def _lineup(self, executor: ExecutorState, queue: WaitingQueue, now_s: float) -> Lineup:
        running, paused = executor.slots_by_lane(), bool(self._roster.paused)
        lineup = Lineup(queue, running, executor.max_num_seqs, now_s, executor.mirror.hit, paused)
        if self._warden.holds_batch(executor):
            lineup.skip_lane(Lane.BATCH)
        return lineup

    def _admit(self, executor: ExecutorState, ordering: Ordering, lineup: Lineup, draft: Draft, slots: int, now_s: float) -> None:
        """Admits in the queue's order. Past a head that does not fit, equals may overtake it `max_overtakes` times in all."""
        passed: list[LiveRequest] = []
        quotas = QuotaCheck(self._roster.quotas, now_s)
        for live in lineup:
            if slots == 0 or draft.budget == 0 or not self._may_pass(live, passed, ordering):
                break
            if quarantine.must_wait(live, executor):
                break
            if not self._room.can_be_held(live):
                ending = _too_long(live)
                for choice in tuple(live.gang or (live,)):
                    self._roster.end(choice, ending, now_s)
            elif not self._room.is_candidate(live, executor):
                continue
            elif not quotas.admits(live.request.tenant, live.gang_size, self._room.most_blocks(live, executor)):
                lineup.skip_tenant(live.request.tenant)
            elif live.sequence is not None or live.gang_size > slots or self._room.is_short(live, executor):
                passed.append(live)
                lineup.passes()
            else:
                slots -= live.gang_size
                lineup.admits(live)
                self._admit_gang(live, executor, draft, now_s)
                for head in passed:
                    head.overtaken += 1
                if live.suspect_until:
                    break

    def _may_pass(self, live: LiveRequest, passed: list[LiveRequest], ordering: Ordering) -> bool:
        """A preempted request is passed by nobody of its lane (C25), any other by its equals; all a bounded number of times."""
        return len(passed) <= self._max_overtakes and not any(
            head.overtaken >= self._max_overtakes or ordering.outranks(head, live) or _resumes_before(head, live) for head in passed
        )

    def _admit_gang(self, live: LiveRequest, executor: ExecutorState, draft: Draft, now_s: float) -> None:
        """A request, or all choices that wait with it: each has its slot and its blocks from now on, and runs when it can."""
        blocks = self._room.blocks_needed(live, executor) // live.gang_size
        sequences = [self._admit_one(choice, blocks, executor, now_s) for choice in tuple(live.gang or (live,))]
        for sequence in sequences if len(sequences) > 1 else ():
            sequence.siblings = sequences
            sequence.may_skip = True
        for sequence in [s for s in sequences if not forks.waits(s, executor)]:
            if draft.budget:
                draft.prefill(sequence, executor)

    def _admit_one(self, live: LiveRequest, blocks: int, executor: ExecutorState, now_s: float) -> Sequence:
        hit = executor.mirror.hit(live)
        sequence = self._roster.admit(live, executor, now_s)
        executor.batch_room = max(0, executor.batch_room - 1)
        if live.suspect_until:
            executor.probation = sequence
        sequence.predicted = hit
        executor.forecast.reserve(sequence, blocks)
        request = live.request
        token_ids = (*request.prompt, *live.output)
        sequence.admission = Admission(sequence.sequence_id, token_ids, len(request.prompt), request.sampling, request.cache_salt)
        return sequence

    # ---- the plan ----

    def _issue(self, executor: ExecutorState, draft: Draft) -> Plan | None:
        if not draft.sequences and not executor.to_release:
            return None
        executor.last_plan_id += 1
        plan = Plan(
            executor.epoch,
            executor.last_plan_id,
            tuple(executor.to_release),
            tuple(draft.admissions),
            tuple([sequence.sequence_id for sequence in draft.sequences]),
            tuple(draft.counts),
            draft.steps,
        )
        executor.to_release = []
        executor.plans_out.append(PlanOut(plan, tuple(draft.sequences)))
        return plan


def _may_repeat(executor: ExecutorState) -> bool:
    """A plan out may be cut short, and of those behind it only the first can be planned as if it were not."""
    return executor.description.multi_step and executor.description.pipeline_depth <= 2


def _resumes_before(head: LiveRequest, live: LiveRequest) -> bool:
    """A lower lane's does not, though its lane's guarantee puts it first: what it lacks may be long in coming."""
    return head.state is State.PREEMPTED and head.request.lane <= live.request.lane


def _needs_block(sequence: Sequence) -> bool:
    """Whether its next token lies beyond its reservation: only a decode's can."""
    return sequence.planned_computed >= sequence.covered and sequence.planned_known < sequence.limit


def _may_outrun(sequence: Sequence, forecast: Forecast) -> bool:
    """Whether one more plan could take it past its reservation, since its first result is out and a cached prefix may be in it."""
    return sequence.computed == 0 and forecast.blocks(sequence.most_computed(1)) > sequence.reserved


def _too_long(live: LiveRequest) -> Ending:
    error = f"{live.known} tokens, prompt and output, are more than the KV blocks or the model length of any executor allow"
    if live.gang_size > 1:
        error = f"{live.gang_size} choices of {live.known} tokens are more than any executor has slots or KV blocks for at once"
    return Ending(State.FAILED, FinishReason.ERROR, "too long", error, RESOURCE_EXHAUSTED)
