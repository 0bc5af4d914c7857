"""Who gives way: the victim when blocks run short, and running sequences that a waiting request outranks (C33).

A lane keeps the slots that it is guaranteed: those of a higher lane take only what is beyond. Must not know: the plan being made.
"""

from __future__ import annotations

from tokenmill_scheduler.core import quarantine
from tokenmill_scheduler.core.admitter import Admitter
from tokenmill_scheduler.core.batching import Batching
from tokenmill_scheduler.core.counters import Preemption
from tokenmill_scheduler.core.executor import ExecutorState
from tokenmill_scheduler.core.lanes import guaranteed_slots
from tokenmill_scheduler.core.live import LiveRequest
from tokenmill_scheduler.core.queue import WaitingQueue
from tokenmill_scheduler.core.quotas import QuotaCheck
from tokenmill_scheduler.core.room import Room
from tokenmill_scheduler.core.roster import Roster
from tokenmill_scheduler.core.sequence import Sequence

_DISPLACED = "displaced by a request of higher priority"


def last_in_order(executor: ExecutorState, queue: WaitingQueue) -> Sequence | None:
    """The running sequence that would be admitted last: lowest lane and priority, then latest arrival.

    That is mostly the one with least work to lose. Not always, but the earliest gets on in any case, whereas of two that give way
    by their computed tokens each could be the one with fewer, in turn, for ever.
    """
    return max(_candidates(executor), key=lambda sequence: _place(sequence, queue), default=None)


class Displacement:
    def __init__(self, roster: Roster, batching: Batching, room: Room, admitter: Admitter) -> None:
        self._roster = roster
        self._batching = batching
        self._room = room
        self._admitter = admitter

    def make_way(self, executor: ExecutorState, queue: WaitingQueue, now_s: float) -> None:
        """Preempts an outranked running sequence for each slot a waiting request lacks, or one a plan for its blocks."""
        if not self._batching.displaces or not self._anybody_outranks(executor, queue):
            return
        slots = self._batching.open_slots(executor, queue, now_s)
        budget = executor.max_num_batched_tokens - sum(s.remaining for s in executor.running.values() if not s.exhausted)
        blocks = self._room.blocks_free(executor)
        lineup = self._admitter.lineup(executor, queue, now_s)
        quotas = QuotaCheck(self._roster.quotas, now_s)
        for live in lineup:
            if not self._room.is_candidate(live, executor):
                continue
            most_blocks = self._room.most_blocks(live, executor)
            if not quotas.admits(live.request.tenant, live.gang_size, most_blocks):
                lineup.skip_tenant(live.request.tenant)
                continue
            if budget <= 0 or live.sequence is not None or quarantine.must_wait(live, executor):
                return
            need = self._room.blocks_needed(live, executor)
            lacking = live.gang_size - max(slots, 0)
            if lacking > 0 or need > blocks:
                victims = _outranked(live, executor, queue)
                if not victims or lacking > len(victims):
                    lineup.skip_lane(live.request.lane)
                    continue
                if need > blocks:
                    if executor.blocks_returning < need - blocks <= executor.blocks_returning + sum(s.reserved for s in victims):
                        self._displace(victims[:1], now_s)
                    return
                self._displace(victims[:lacking], now_s)
            slots -= live.gang_size - max(lacking, 0)
            if live.suspect_until:
                return
            quotas.promise(live.request.tenant, live.gang_size, most_blocks)
            blocks -= need
            budget -= live.known
            lineup.admits(live)

    def _anybody_outranks(self, executor: ExecutorState, queue: WaitingQueue) -> bool:
        """Whether one that waits could take anything from one that runs: in most steps nobody could."""
        lanes = [lane for lane, waiting in queue.lanes.items() if waiting.lines]
        if not lanes or (self._roster.paused and not queue.num_resuming):
            return False
        guaranteed = guaranteed_slots(queue.ordering.lane_shares, executor.max_num_seqs)
        if any(lanes[0] < lane and count > guaranteed[lane] for lane, count in executor.running_by_lane.items()):
            return True
        if not queue.ordering.policy.displaces or queue.ordering.fair_share:
            return False
        # In every step, for every sequence: the policy alone first, which mostly says no.
        outranks, displaces = queue.ordering.policy.outranks, queue.ordering.displaces
        running = [sequence.live for sequence in executor.running.values() if sequence.live is not None]
        heads = [next(queue.lanes[lane].heads()) for lane in lanes]
        return any(outranks(head, live) and displaces(head, live) for head in heads for live in running)

    def _displace(self, victims: list[Sequence], now_s: float) -> None:
        for victim in victims:
            self._roster.preempt(victim, now_s, Preemption.DISPLACED, _DISPLACED)


def _outranked(live: LiveRequest, executor: ExecutorState, queue: WaitingQueue) -> list[Sequence]:
    """All that may be given up for this one, the last in order first."""
    guaranteed = guaranteed_slots(queue.ordering.lane_shares, executor.max_num_seqs)
    spare = {lane: count - guaranteed[lane] for lane, count in executor.slots_by_lane().items()}
    outranked = [s for s in _candidates(executor) if s.live and queue.ordering.displaces(live, s.live)]
    victims = []
    for sequence in sorted(outranked, key=lambda sequence: _place(sequence, queue), reverse=True):
        assert sequence.live is not None
        lane = sequence.live.request.lane
        if lane is live.request.lane or spare[lane] > 0:
            spare[lane] -= 1
            victims.append(sequence)
    return victims


def _candidates(executor: ExecutorState) -> list[Sequence]:
    return [sequence for sequence in executor.running.values() if not sequence.exhausted]


def _place(sequence: Sequence, queue: WaitingQueue) -> tuple[float, ...]:
    assert sequence.live is not None
    return queue.place(sequence.live)
