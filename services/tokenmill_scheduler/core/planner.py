"""Makes one plan for one executor. The main loop of continuous batching is `Planner.plan`.

    relieve    a decode needs a block and none is to be had → one victim is preempted
    displace   a waiting request outranks a running one and lacks its slot or its blocks → that one is preempted (`displacement.py`)
    advance    running sequences: every decode, then prefills in order of admission
    admit      from the queue, in its order, while tokens, slots and blocks last (`admitter.py`)
    repeat     where all that is left is to decode: the same step again and again, until another plan comes

Every sequence is advanced on its planned figures (see `sequence.py`), every block is counted against the forecast (`forecast.py`).
Must not know: how results are read, deadlines, where plans are sent.
"""

from __future__ import annotations

from tokenmill_scheduler.core import forks, quarantine
from tokenmill_scheduler.core.admitter import Admitter
from tokenmill_scheduler.core.batching import Batching
from tokenmill_scheduler.core.counters import Preemption
from tokenmill_scheduler.core.displacement import Displacement, last_in_order
from tokenmill_scheduler.core.draft import Draft
from tokenmill_scheduler.core.executor import ExecutorState, PlanOut
from tokenmill_scheduler.core.forecast import Forecast
from tokenmill_scheduler.core.plans import Plan
from tokenmill_scheduler.core.queue import WaitingQueue
from tokenmill_scheduler.core.room import Room, too_long
from tokenmill_scheduler.core.roster import Roster
from tokenmill_scheduler.core.sequence import Sequence

_OUT_OF_BLOCKS = "out of KV blocks"


class Planner:
    def __init__(self, roster: Roster, batching: Batching, room: Room, admitter: Admitter, displacement: Displacement) -> None:
        self._roster = roster
        self._batching = batching
        self._room = room
        self._admitter = admitter
        self._displacement = displacement

    def plan(self, executor: ExecutorState, now_s: float, max_steps: int = 1) -> Plan | None:
        """The next plan, booked; None when there is nothing to release, admit or advance."""
        draft = self._draft(executor, now_s)
        if max_steps > 1 and draft.sequences and draft.only_decodes and _may_repeat(executor):
            self._repeat(executor, draft, max_steps)
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
        lineup = self._admitter.lineup(executor, queue, now_s) if slots > 0 and len(queue) else None
        self._advance(executor, draft)
        if lineup is not None and draft.budget:
            self._admitter.admit(executor, queue.ordering, lineup, draft, slots, now_s)
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
            self._roster.end(live, too_long(live), now_s)

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
        """Lets all of them go on, in plans of `most` steps, until the first reaches its limit."""
        forecast = executor.forecast
        left = min(sequence.limit - sequence.planned_known for sequence in draft.sequences) + 1
        # As few plans as reach it, all alike: of a longer one a few steps may be left over, for plans of their own.
        further = min(-(-left // -(-left // most)), 1 + draft.budget // len(draft.sequences)) - 1
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
            executor.needs_all_steps,
        )
        executor.to_release = []
        executor.plans_out.append(PlanOut(plan, tuple(draft.sequences)))
        return plan


def _may_repeat(executor: ExecutorState) -> bool:
    """A plan out may be cut short, and of those behind it only the first can be planned as if it were not."""
    return executor.description.multi_step and executor.description.pipeline_depth <= 2


def _needs_block(sequence: Sequence) -> bool:
    """Whether its next token lies beyond its reservation: only a decode's can."""
    return sequence.planned_computed >= sequence.covered and sequence.planned_known < sequence.limit


def _may_outrun(sequence: Sequence, forecast: Forecast) -> bool:
    """Whether one more plan could take it past its reservation, since its first result is out and a cached prefix may be in it."""
    return sequence.computed == 0 and forecast.blocks(sequence.most_computed(1)) > sequence.reserved
