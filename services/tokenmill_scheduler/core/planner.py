"""Makes one plan for one executor. The main loop of continuous batching is `Planner.plan`.

    relieve    a decode needs a block and none is to be had → one victim is preempted
    displace   a waiting request outranks a running one and lacks its slot or its blocks → that one is preempted
    advance    running sequences: every decode, then prefills in order of admission
    admit      from the queue, in the policy's order, while tokens, slots and blocks last

Every sequence is advanced on its planned figures (see `sequence.py`), every block is counted against the forecast (`forecast.py`).
Must not know: how results are read, deadlines, where plans are sent.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tokenmill_scheduler.core import quarantine
from tokenmill_scheduler.core.batching import Batching
from tokenmill_scheduler.core.counters import Preemption
from tokenmill_scheduler.core.executor import ExecutorState, PlanOut
from tokenmill_scheduler.core.lineup import Lineup
from tokenmill_scheduler.core.live import RESOURCE_EXHAUSTED, Ending, LiveRequest
from tokenmill_scheduler.core.queue import WaitingQueue
from tokenmill_scheduler.core.records import Admission, Plan
from tokenmill_scheduler.core.request import FinishReason, State
from tokenmill_scheduler.core.room import Room
from tokenmill_scheduler.core.roster import Roster, Waiting
from tokenmill_scheduler.core.sequence import Sequence

_OUT_OF_BLOCKS = "out of KV blocks"
_DISPLACED = "displaced by a request of higher priority"


@dataclass(slots=True)
class Draft:
    """A plan in the making; `budget` is what is left of its tokens."""

    budget: int
    admissions: list[Admission] = field(default_factory=list)
    sequences: list[Sequence] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)

    def advance(self, sequence: Sequence, count: int) -> None:
        self.budget -= count
        self.sequences.append(sequence)
        self.counts.append(count)
        sequence.plan(count)


class Planner:
    """`max_overtakes` bounds who may pass a head that does not fit, `max_hit_overtakes` who may for the sake of a prefix hit."""

    def __init__(self, roster: Roster, batching: Batching, room: Room, max_overtakes: int, max_hit_overtakes: int) -> None:
        self._roster = roster
        self._policy = roster.policy
        self._batching = batching
        self._room = room
        self._max_overtakes = max_overtakes
        self._most_hit_overtakes = max_hit_overtakes

    def plan(self, executor: ExecutorState, now_s: float) -> Plan | None:
        """The next plan, booked; None when there is nothing to release, admit or advance."""
        queue = self._roster.queue(executor.description.model)
        draft = Draft(executor.max_num_batched_tokens)
        self._relieve(executor, now_s)
        waiting = self._roster.admissible(queue)
        if self._is_closed(executor) or (self._roster.paused and not waiting):
            self._advance(executor, draft)
            return self._issue(executor, draft)
        if self._policy.displaces and self._batching.displaces:
            self._displace(executor, queue, waiting, now_s)
        # Counted before the advance: a sequence that takes its last step in this plan still has its slot.
        slots = self._batching.open_slots(executor, queue, now_s)
        self._advance(executor, draft)
        self._admit(executor, waiting, draft, slots, now_s)
        return self._issue(executor, draft)

    def _is_closed(self, executor: ExecutorState) -> bool:
        return executor.name in self._roster.drained or quarantine.on_trial(executor)

    # ---- running sequences ----

    def _relieve(self, executor: ExecutorState, now_s: float) -> None:
        """Preempts at most one sequence, and none while blocks on their way back cover what decodes lack (C17)."""
        forecast = executor.forecast
        in_need = [s for s in executor.running.values() if _needs_block(s, forecast.block_size)]
        shortage = len(in_need) - forecast.free
        if shortage <= 0:
            return
        outgrown = [s for s in in_need if s.reserved >= executor.description.num_blocks]
        if outgrown:
            # It has every block there is, so it is alone.
            self._outgrow(executor, outgrown[0], now_s)
        elif shortage > executor.blocks_returning:
            victim = self._last_in_order(executor)
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

    def _last_in_order(self, executor: ExecutorState) -> Sequence | None:
        """The running sequence that the policy would run last: lowest priority, then latest arrival, so least work is lost."""
        candidates = [s for s in executor.running.values() if not s.exhausted]
        return max(candidates, key=self._rank, default=None)

    def _rank(self, sequence: Sequence) -> tuple[float, ...]:
        assert sequence.live is not None
        return self._policy.rank(sequence.live)

    def _advance(self, executor: ExecutorState, draft: Draft) -> None:
        """Every decode that has or gets its block, then prefills by what is left of the budget."""
        forecast, block_size = executor.forecast, executor.forecast.block_size
        ahead = executor.description.caches_prefixes
        prefills: list[Sequence] = []
        for sequence in executor.running.values():
            if sequence.planned_known >= sequence.limit or (ahead and _may_outrun(sequence, block_size)):
                continue
            if sequence.remaining > 1:
                prefills.append(sequence)
                continue
            if sequence.planned_computed >= sequence.reserved * block_size:
                if forecast.free < 1:
                    continue
                forecast.reserve(sequence, 1)
            draft.advance(sequence, 1)
        for sequence in prefills:
            if draft.budget == 0:
                break
            draft.advance(sequence, min(sequence.remaining, draft.budget))

    # ---- waiting requests ----

    def _displace(self, executor: ExecutorState, queue: WaitingQueue, waiting: Waiting, now_s: float) -> None:
        """Preempts a strictly lower running sequence for each slot a waiting request lacks (C33), or one a plan for its blocks."""
        head = next(iter(waiting), None)
        if head is None or self._outranked(head, executor) is None:
            return
        slots = self._batching.open_slots(executor, queue, now_s)
        budget = executor.max_num_batched_tokens - sum(s.remaining for s in executor.running.values() if not s.exhausted)
        blocks = self._room.blocks_free(executor)
        for live in waiting:
            if not self._room.is_candidate(live, executor):
                continue
            if budget <= 0 or live.sequence is not None or quarantine.must_wait(live, executor):
                return
            need = self._room.blocks_needed(live, executor)
            if slots <= 0 or need > blocks:
                victim = self._outranked(live, executor)
                if victim is None:
                    return
                if need > blocks:
                    if self._blocks_can_be_had(live, need - blocks, executor):
                        self._roster.preempt(victim, now_s, Preemption.DISPLACED, _DISPLACED)
                    return
                self._roster.preempt(victim, now_s, Preemption.DISPLACED, _DISPLACED)
            else:
                slots -= 1
            if live.suspect_until:
                return
            blocks -= need
            budget -= live.known

    def _outranked(self, live: LiveRequest, executor: ExecutorState) -> Sequence | None:
        victim = self._last_in_order(executor)
        outranked = victim is not None and victim.live is not None and self._policy.outranks(live, victim.live)
        return victim if outranked else None

    def _blocks_can_be_had(self, live: LiveRequest, lacking: int, executor: ExecutorState) -> bool:
        """Whether preempting helps: blocks on their way back do not suffice, and with those of all outranked sequences they do."""
        returning = executor.blocks_returning
        outranked = (s for s in executor.running.values() if not s.exhausted and s.live and self._policy.outranks(live, s.live))
        return returning < lacking <= returning + sum(s.reserved for s in outranked)

    def _admit(self, executor: ExecutorState, waiting: Waiting, draft: Draft, slots: int, now_s: float) -> None:
        """Admits in the policy's order. Past a head that does not fit, equals may overtake it `max_overtakes` times in all."""
        passed: list[LiveRequest] = []
        if slots <= 0 or draft.budget == 0:
            return
        hit = executor.mirror.hit if self._policy.prefers_hits else None
        lineup = Lineup(waiting, hit, self._most_hit_overtakes)
        for live in lineup:
            if slots == 0 or draft.budget == 0 or not self._may_pass(live, passed) or quarantine.must_wait(live, executor):
                break
            if not self._room.can_be_held(live):
                self._roster.end(live, _too_long(live), now_s)
            elif not self._room.is_candidate(live, executor):
                continue
            elif live.sequence is not None or self._room.is_short(live, executor):
                passed.append(live)
            else:
                self._admit_one(live, executor, draft, now_s)
                slots -= 1
                lineup.admitted(live)
                for head in passed:
                    head.overtaken += 1
                if live.suspect_until:
                    break

    def _may_pass(self, live: LiveRequest, passed: list[LiveRequest]) -> bool:
        """A preempted request is passed by nobody (C25), any other by its equals and a bounded number of times."""
        return len(passed) <= self._max_overtakes and not any(
            head.state is State.PREEMPTED or head.overtaken >= self._max_overtakes or self._policy.outranks(head, live)
            for head in passed
        )

    def _admit_one(self, live: LiveRequest, executor: ExecutorState, draft: Draft, now_s: float) -> None:
        blocks, hit = self._room.blocks_needed(live, executor), executor.mirror.hit(live)
        sequence = self._roster.admit(live, executor, now_s)
        executor.batch_room = max(0, executor.batch_room - 1)
        if live.suspect_until:
            executor.probation = sequence
        sequence.predicted = hit
        executor.forecast.reserve(sequence, blocks)
        request = live.request
        token_ids = (*request.prompt, *live.output)
        draft.admissions.append(
            Admission(sequence.sequence_id, token_ids, len(request.prompt), request.sampling, request.cache_salt)
        )
        draft.advance(sequence, min(sequence.remaining, draft.budget))

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
        )
        executor.to_release = []
        executor.plans_out.append(PlanOut(plan, tuple(draft.sequences)))
        return plan


def _needs_block(sequence: Sequence, block_size: int) -> bool:
    """Whether its next token lies beyond its reservation: only a decode's can."""
    return sequence.planned_computed >= sequence.reserved * block_size and sequence.planned_known < sequence.limit


def _may_outrun(sequence: Sequence, block_size: int) -> bool:
    """Whether one more plan could take it past its reservation, since its first result is out and a cached prefix may be in it."""
    return sequence.computed == 0 and sequence.most_computed(1) > sequence.reserved * block_size


def _too_long(live: LiveRequest) -> Ending:
    error = f"{live.known} tokens, prompt and output, are more than the KV blocks or the model length of any executor allow"
    return Ending(State.FAILED, FinishReason.ERROR, "too long", error, RESOURCE_EXHAUSTED)
