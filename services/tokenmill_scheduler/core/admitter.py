"""Who joins the batch: waiting requests in the queue's order, while tokens, slots and blocks last, past a head that does not fit.

Must not know: who gives way (`displacement.py`), how running sequences are advanced (`planner.py`).
"""

from __future__ import annotations

from tokenmill_scheduler.core import forks, quarantine
from tokenmill_scheduler.core.draft import Draft
from tokenmill_scheduler.core.executor import ExecutorState
from tokenmill_scheduler.core.lineup import Lineup
from tokenmill_scheduler.core.live import LiveRequest
from tokenmill_scheduler.core.ordering import Ordering
from tokenmill_scheduler.core.plans import Admission
from tokenmill_scheduler.core.queue import WaitingQueue
from tokenmill_scheduler.core.quotas import QuotaCheck
from tokenmill_scheduler.core.request import Lane, State
from tokenmill_scheduler.core.room import Room, too_long
from tokenmill_scheduler.core.roster import Roster
from tokenmill_scheduler.core.sequence import Sequence
from tokenmill_scheduler.core.warden import Warden


class Admitter:
    """`max_overtakes` bounds how often others may pass a request that does not fit; `least_shared` tokens are worth waiting for."""

    def __init__(self, roster: Roster, room: Room, warden: Warden, max_overtakes: int, least_shared: int) -> None:
        self._roster = roster
        self._room = room
        self._warden = warden
        self._max_overtakes = max_overtakes
        self._least_shared = least_shared

    def lineup(self, executor: ExecutorState, queue: WaitingQueue, now_s: float) -> Lineup:
        """Who may be admitted here, in order; nobody is yet."""
        running, paused = executor.slots_by_lane(), bool(self._roster.paused)
        lineup = Lineup(queue, running, executor.max_num_seqs, now_s, executor.mirror.hit, paused)
        if self._warden.holds_batch(executor):
            lineup.skip_lane(Lane.BATCH)
        return lineup

    def admit(self, executor: ExecutorState, ordering: Ordering, lineup: Lineup, draft: Draft, slots: int, now_s: float) -> None:
        """Admits in the queue's order. Past a head that does not fit, equals may overtake it `max_overtakes` times in all."""
        passed: list[LiveRequest] = []
        quotas = QuotaCheck(self._roster.quotas, now_s)
        for live in lineup:
            if slots == 0 or draft.budget == 0 or not self._may_pass(live, passed, ordering):
                break
            if quarantine.must_wait(live, executor):
                break
            if not self._room.can_be_held(live):
                ending = too_long(live)
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
        self._await_prefix(sequences[0], executor)
        if sequences[0].lead is not None:
            # In a later plan: it may be this one in which the blocks are computed.
            return
        for sequence in [s for s in sequences if not forks.waits(s, executor)]:
            if draft.budget:
                draft.prefill(sequence, executor)

    def _await_prefix(self, sequence: Sequence, executor: ExecutorState) -> None:
        """Finds whether a running sequence is about to compute much of what this one begins with; others may find this one."""
        assert sequence.live is not None
        block_size, cached = executor.description.block_size, sequence.predicted
        if sequence.known - cached < self._least_shared:
            return
        count, start = sequence.known // block_size, cached // block_size
        hashes = executor.mirror.hashes(sequence.live, count)
        if not hashes:
            return
        found = executor.coming.find(hashes, start, (sequence.known - 1) // block_size)
        if found is not None and found[1] * block_size - cached >= self._least_shared:
            sequence.lead, sequence.shared = found[0], found[1] * block_size
        executor.coming.add(sequence, hashes[start:count])

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


def _resumes_before(head: LiveRequest, live: LiveRequest) -> bool:
    """A lower lane's does not, though its lane's guarantee puts it first: what it lacks may be long in coming."""
    return head.state is State.PREEMPTED and head.request.lane <= live.request.lane
