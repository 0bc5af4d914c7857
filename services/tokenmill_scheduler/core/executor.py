"""The scheduler's picture of one executor: its sequences, its plans that are out, its blocks. Must not know: queues, policies."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from tokenmill_scheduler.core.coming import ComingBlocks
from tokenmill_scheduler.core.forecast import Forecast
from tokenmill_scheduler.core.mirror import Mirror
from tokenmill_scheduler.core.plans import Blocks, ExecutorDescription, Plan
from tokenmill_scheduler.core.request import Lane
from tokenmill_scheduler.core.sequence import Sequence


@dataclass(frozen=True, slots=True)
class PlanOut:
    """A plan not answered yet, with the sequences it advances, in its order."""

    plan: Plan
    sequences: tuple[Sequence, ...]

    @property
    def reaches_end(self) -> bool:
        """Whether its steps bring one to its limit, of the newest plan; said of several steps only."""
        return self.plan.max_steps > 1 and any(sequence.exhausted for sequence in self.sequences)


@dataclass(slots=True, eq=False)
class ExecutorState:
    """One executor in one epoch; a lost one keeps its description alone.

    A sequence is `running` (in order of admission), or `leaving`: given up or ended, but its blocks are not back yet.
    `to_release` goes into the next plan. `batch_room` counts the requests a static batch may still take in.
    `asked_s` is when a plan was last asked for, `lost_s` when it was lost. `probation` is the last suspect admitted (see
    `quarantine.py`).
    """

    description: ExecutorDescription
    epoch: int
    blocks: Blocks
    max_num_seqs: int
    max_num_batched_tokens: int
    forecast: Forecast = field(init=False)
    mirror: Mirror = field(init=False)
    coming: ComingBlocks = field(default_factory=ComingBlocks)
    joined: bool = True
    running: dict[int, Sequence] = field(default_factory=dict)
    running_by_lane: dict[Lane, int] = field(default_factory=lambda: dict.fromkeys(Lane, 0))
    leaving: dict[int, Sequence] = field(default_factory=dict)
    to_release: list[int] = field(default_factory=list)
    plans_out: deque[PlanOut] = field(default_factory=deque)
    last_plan_id: int = 0
    steps: int = 0
    batch_room: int = 0
    asked_s: float = float("-inf")
    lost_s: float = float("-inf")
    probation: Sequence | None = None

    def __post_init__(self) -> None:
        description = self.description
        self.forecast = self._forecast(self.blocks.available)
        cached = description.num_blocks + description.num_host_blocks
        self.mirror = Mirror(description.cache_version, description.block_size, cached)

    def _forecast(self, available: int) -> Forecast:
        description = self.description
        return Forecast(
            description.block_size, available, description.block_groups, description.pipeline_depth, self.max_num_batched_tokens
        )

    @property
    def name(self) -> str:
        return self.description.name

    @property
    def has_plan_room(self) -> bool:
        return self.joined and len(self.plans_out) < self.description.pipeline_depth

    @property
    def slots_taken(self) -> int:
        """A sequence that the plans out end takes part in no further step: its slot can be planned with already (C36)."""
        return sum(not sequence.exhausted for sequence in self.running.values())

    @property
    def open_slots(self) -> int:
        """Slots to admit to. Behind a plan of several steps the slots of nobody come first: who takes one waits for the step in
        progress only, who takes one that a sequence has until the plan ends it, for all of them."""
        nobodys = self.max_num_seqs - len(self.running)
        return nobodys if nobodys > 0 and self._may_be_cut else self.max_num_seqs - self.slots_taken

    @property
    def needs_all_steps(self) -> bool:
        """Whether more run than there are slots, until the plan ahead has ended some: it must not be cut short before."""
        return self._may_be_cut and len(self.running) > self.max_num_seqs

    @property
    def _may_be_cut(self) -> bool:
        """Whether the plan ahead of the next one is of several steps: the only one out, so that who is exhausted is so by it."""
        return bool(self.plans_out) and self.plans_out[-1].plan.max_steps > 1

    def executing(self) -> list[Sequence]:
        """Running sequences in the batch that is carried out now, so never more than slots: who is admitted by a plan behind that,
        to a slot that somebody has until then, is not among them yet."""
        now = self.plans_out[0].plan.plan_id if self.plans_out else self.last_plan_id
        return [sequence for sequence in self.running.values() if sequence.admitted_in <= now]

    def take(self, sequence: Sequence) -> None:
        """It runs here from now on."""
        assert sequence.live is not None
        self.running[sequence.sequence_id] = sequence
        self.running_by_lane[sequence.live.request.lane] += 1

    def slots_by_lane(self) -> dict[Lane, int]:
        """Of the slots taken, those of each lane."""
        taken = self.running_by_lane.copy()
        for sequence in [s for s in self.running.values() if s.exhausted]:
            assert sequence.live is not None
            taken[sequence.live.request.lane] -= 1
        return taken

    @property
    def blocks_returning(self) -> int:
        """Blocks that results of plans already decided on will bring back: of sequences leaving, or about to end."""
        ending = sum(sequence.reserved for sequence in self.running.values() if sequence.exhausted)
        return ending + sum(sequence.reserved for sequence in self.leaving.values())

    def can_hold(self, known: int) -> bool:
        """Whether `known` tokens can be computed, and one more be sampled, when nothing else is there."""
        return known < self.description.max_model_len and self.forecast.least(known) <= self.description.num_blocks

    def most_blocks(self, limit: int) -> int:
        """Blocks that a sequence of at most `limit` tokens can come to: its last token is never computed."""
        return min(self.forecast.blocks(limit - 1), self.description.num_blocks)

    def sequence(self, sequence_id: int) -> Sequence | None:
        return self.running.get(sequence_id) or self.leaving.get(sequence_id)

    def release(self, sequence: Sequence) -> None:
        """Gives up a running sequence: the next plan tells the executor to drop it."""
        self._leave(sequence)
        self.to_release.append(sequence.sequence_id)

    def finish(self, sequence: Sequence) -> None:
        """The executor has let a sequence go by itself; one that was given up before stays so."""
        if sequence.sequence_id in self.running:
            sequence.finished = True
            self._leave(sequence)

    def _leave(self, sequence: Sequence) -> None:
        del self.running[sequence.sequence_id]
        self.coming.remove(sequence)
        assert sequence.live is not None
        self.running_by_lane[sequence.live.request.lane] -= 1
        self.leaving[sequence.sequence_id] = sequence
        # One that has not answered yet may be far ahead of its bookings, by a shared prefix: what was booked for it covers that.
        if sequence.computed or not (sequence.may_skip and sequence.plans_out):
            self.forecast.trim(sequence)

    def settle_leaving(self, released: tuple[int, ...]) -> list[int]:
        """After a result: forgets sequences whose blocks are back, and unbinds preempted ones that can bring no more tokens.

        Returns those forgotten.
        """
        forgotten = list(released)
        for sequence_id in released:
            self.forecast.forget(self.leaving.pop(sequence_id))
        for sequence in [s for s in self.leaving.values() if s.plans_out == 0]:
            unbind(sequence)
            if sequence.finished:
                self.forecast.forget(self.leaving.pop(sequence.sequence_id))
                forgotten.append(sequence.sequence_id)
        return forgotten

    def lose(self) -> list[Sequence]:
        """The executor is gone, with all bookings; returns every sequence it had, in order of admission."""
        sequences = [*self.leaving.values(), *self.running.values()]
        self.joined = False
        self.running, self.leaving = {}, {}
        self.running_by_lane = dict.fromkeys(Lane, 0)
        self.to_release = []
        self.plans_out.clear()
        self.batch_room = 0
        self.probation = None
        self.blocks = Blocks(0, 0, 0)
        self.forecast = self._forecast(0)
        self.mirror.clear()
        self.coming.clear()
        return sequences


def unbind(sequence: Sequence) -> None:
    """Nothing more will come of this sequence: its request, if it still has one, may be admitted anew."""
    if sequence.live is not None:
        sequence.live.sequence = None
        sequence.live = None
