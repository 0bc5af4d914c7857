"""A small executor written from the plan protocol alone, to judge the scheduler's plans by: block pool, steps, token oracle.

It imports no executor code. What would be a bug of the scheduler is an assertion here. It can overlap plans as a GPU executor does:
while plan N runs, N+1 is prepared already, so a sequence that N finishes keeps its blocks, and may take another, until N+1 is done,
and one that N+1 releases keeps them until N is done.

Layers may be of several groups: a sequence then has a block of each group, one after the other, for each stretch of its positions.

A plan of several steps ends early when another one waits that is not `after_all_steps`; that may have come during a later step.

It can cache prefixes: blocks are known by all tokens up to their end, and evicted in the order in which they were let go. A fork
shares the full blocks of its prompt that the other sequence has, by the time it is first advanced.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from tokenmill_scheduler.core.plans import Admission, Blocks, ExecutorDescription, Fault, Plan, Result, SequenceFault

from tests.simulation import oracle
from tests.simulation.pool import GONE, Pool

NONE, STOP, LENGTH = 0, 1, 2


@dataclass
class _Sequence:
    """`launched` tokens are computed once every prepared step is done; `sampling` steps of those sample. `ready` were launched
    before the step that is being prepared. `refused`: a step that had no block for it may have been its last."""

    tokens: list[int]
    admission: Admission
    launched: int = 0
    ready: int = 0
    sampling: int = 0
    steps: int = 0
    blocks: list[int] = field(default_factory=list)
    finished: bool = False
    released: bool = False
    refused: bool = False

    def most_tokens(self, max_model_len: int) -> int:
        return min(self.admission.num_prompt_tokens + self.admission.sampling.max_tokens, max_model_len)

    @property
    def known(self) -> int:
        """Once every step that is launched is done."""
        return len(self.tokens) + self.sampling

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.admission.num_prompt_tokens


@dataclass(frozen=True)
class _Row:
    """Computes `count` tokens from `start` on, `cached` of those before it come from the cache by this very row."""

    sequence: _Sequence
    start: int
    count: int
    samples: bool
    cached: int


@dataclass
class _Step:
    """A plan whose blocks are taken: `taken` of them net of those it released. A row is None where the sequence takes no part."""

    plan: Plan
    rows: list[_Row | None]
    faults: dict[int, Fault]
    taken: int


@dataclass
class _Columns:
    """A result in the making, one entry for each sequence of the plan; `goes_on`: it has sampled in the last step."""

    computed: list[int]
    cached: list[int]
    tokens: list[list[int]]
    finishes: list[int]
    goes_on: list[bool]
    steps: int = 0

    @classmethod
    def of(cls, step: _Step) -> _Columns:
        n = len(step.rows)
        return cls([0] * n, [0] * n, [[] for _ in range(n)], [NONE] * n, [False] * n)

    def result(self, step: _Step, blocks: Blocks, dropped: tuple[int, ...], stored: tuple[int, ...]) -> Result:
        return Result(
            step.plan.epoch,
            step.plan.plan_id,
            step.plan.advance_sequence_ids,
            tuple(self.computed),
            tuple(map(len, self.tokens)),
            tuple([token for tokens in self.tokens for token in tokens]),
            tuple(self.finishes),
            blocks,
            step.faults,
            num_cached=tuple(self.cached) if any(self.cached) else (),
            dropped=dropped,
            stored=stored,
            num_steps=self.steps,
        )


class Died(Exception):
    """A poisoned sequence has killed the executor."""


class ModelExecutor:
    """`send` queues a plan, `step` carries out the oldest and returns its result.

    `slots`: so many sequences may be on their way at once. `inject` makes the next advance of the sequences of these seeds fail.
    `poison` has for a seed the position that kills the executor when it is computed: `step` raises Died. `ran_out` counts real
    lacks of a block, which an honest forecast prevents, `forked` the blocks that forks have shared.
    """

    def __init__(self, description: ExecutorDescription, overlap: bool = False, slots: int | None = None) -> None:
        self.description = description
        self.slots = slots or description.max_num_seqs
        self.overlap = overlap
        self.inject: dict[int, SequenceFault] = {}
        self.poison: dict[int, int] = {}
        self.ran_out = 0
        self.forked = 0
        self.epoch = 0
        self.pool = Pool(description)
        self._sequences: dict[int, _Sequence] = {}
        self.restart(1)

    def restart(self, epoch: int) -> None:
        """A new reign: all sequences and queued plans of the old one are gone; what is cached stays."""
        assert epoch > self.epoch
        self.epoch = epoch
        self._queued: deque[Plan] = deque()
        self._prepared: _Step | None = None
        for sequence in self._sequences.values():
            self.pool.let_go(sequence.blocks)
        self._sequences = {}
        self._admitted: set[int] = set()
        self._released: set[int] = set()
        self._last_plan_id = 0

    @property
    def blocks(self) -> Blocks:
        return self.pool.blocks([sequence.blocks for sequence in self._sequences.values()])

    @property
    def num_groups(self) -> int:
        return len(self.description.block_groups)

    @property
    def idle(self) -> bool:
        return not self._queued and self._prepared is None

    def send(self, plan: Plan) -> None:
        assert plan.epoch == self.epoch
        assert plan.plan_id == self._last_plan_id + 1, "plans out of order"
        assert len(plan.advance_sequence_ids) <= self.description.max_num_seqs
        assert sum(plan.advance_max_tokens) <= self.description.max_num_batched_tokens
        self._last_plan_id = plan.plan_id
        self._queued.append(plan)
        assert len(self._queued) + (self._prepared is not None) <= self.description.pipeline_depth, "too many plans out"

    def step(self) -> Result:
        step = self._prepared or self._prepare(self._queued.popleft())
        most_steps = self._most_steps(step.plan)
        # The next plan is prepared during the last step.
        self._prepared = self._prepare(self._queued.popleft()) if self.overlap and self._queued and most_steps == 1 else None
        columns = _Columns.of(step)
        self._compute(step.rows, columns)
        while columns.steps < most_steps and any(rows := self._go_on(step, columns)):
            self._compute(rows, columns)
        dropped, stored = self.pool.changes()
        return columns.result(step, self._report(), dropped, stored)

    def _most_steps(self, plan: Plan) -> int:
        """All there are, unless another plan waits: that came during the first, or every third time during any other."""
        if not self._queued or self._queued[0].after_all_steps:
            return plan.max_steps
        return 1 if self.overlap or plan.plan_id % 3 else 1 + plan.plan_id // 3 % plan.max_steps

    def _go_on(self, step: _Step, columns: _Columns) -> list[_Row | None]:
        """One token more for those that sampled last and may still be advanced."""
        most = zip(step.plan.advance_sequence_ids, step.plan.advance_max_tokens, columns.computed, columns.goes_on, strict=True)
        return [self._launch(i, 1, step.faults) if goes_on and done < n else None for i, n, done, goes_on in most]

    def _prepare(self, plan: Plan) -> _Step:
        before = self.pool.available
        for sequence_id in plan.release:
            self._released.add(sequence_id)
            self._let_go(sequence_id, released=True)
        for sequence in self._sequences.values():
            sequence.ready = sequence.launched
        for admission in plan.admit:
            self._admit(admission)
        self._check_slots()
        faults: dict[int, Fault] = {}
        rows = [self._launch(i, n, faults) for i, n in zip(plan.advance_sequence_ids, plan.advance_max_tokens, strict=True)]
        return _Step(plan, rows, faults, before - self.pool.available)

    def _admit(self, admission: Admission) -> None:
        assert admission.sequence_id not in self._admitted, "a sequence id was used again"
        self._admitted.add(admission.sequence_id)
        prior = admission.token_ids[admission.num_prompt_tokens :]
        seed = admission.sampling.seed
        assert list(prior) == [oracle.token(seed, index) for index in range(len(prior))], "admitted with another's tokens"
        assert len(prior) < admission.sampling.max_tokens, "admitted with nothing left to do"
        self._sequences[admission.sequence_id] = _Sequence(list(admission.token_ids), admission)

    def _check_slots(self) -> None:
        """Whoever is not at its end once the steps that were launched are done has a slot in the next one."""
        most = self.description.max_model_len
        there = [s for s in self._sequences.values() if not (s.finished or s.released or s.refused)]
        assert sum(s.known < s.most_tokens(most) for s in there) <= self.slots, "more sequences than slots"

    def _launch(self, sequence_id: int, most: int, faults: dict[int, Fault]) -> _Row | None:
        assert sequence_id in self._admitted, "advanced before it was admitted"
        assert sequence_id not in self._released, "advanced after it was released"
        sequence = self._sequences.get(sequence_id)
        if sequence is None or sequence.finished:
            return None
        known = sequence.known
        if known >= sequence.most_tokens(self.description.max_model_len):
            # The steps launched bring it to its length: that much is known before they are over.
            return None
        before, hits = sequence.launched, [] if sequence.launched else self._share(sequence)
        sequence.blocks += hits
        start = before + len(hits) // self.num_groups * self.description.block_size
        count = min(most, known - start)
        fault = self._fault(sequence, start + count)
        if fault is not None:
            faults[sequence_id] = Fault(fault, "from the model executor")
            self.pool.let_go(hits)
            del sequence.blocks[len(sequence.blocks) - len(hits) :]
            sequence.refused = fault is SequenceFault.NO_BLOCKS
            if not sequence.refused:
                self._let_go(sequence_id, finished=True)
            return None
        if before <= self.poison.get(sequence.admission.sampling.seed, -1) < start + count:
            raise Died(sequence.admission.sampling.seed)
        samples = start + count == known
        sequence.launched = start + count
        sequence.sampling += samples
        sequence.steps += 1
        return _Row(sequence, start, count, samples, start - before)

    def _share(self, sequence: _Sequence) -> list[int]:
        """Blocks of its beginning that are there already: cached, or of the sequence it is a fork of."""
        admission = sequence.admission
        hits, other = self.pool.hit(sequence.tokens), self._sequences.get(admission.fork_of)
        if other is None:
            return hits
        prompt = admission.num_prompt_tokens
        assert other.tokens[:prompt] == sequence.tokens[:prompt], "a fork of a sequence with another prompt"
        places = min(prompt, len(sequence.tokens) - 1, other.ready) // self.description.block_size
        shared = other.blocks[: places * self.num_groups]
        if len(shared) <= len(hits) or GONE in shared:
            return hits
        self.pool.let_go(hits)
        self.pool.use(shared)
        self.forked += len(shared)
        return shared

    def _fault(self, sequence: _Sequence, tokens: int) -> SequenceFault | None:
        """Takes the blocks for so many tokens, or says why not."""
        injected = self.inject.pop(sequence.admission.sampling.seed, None)
        if injected is not None:
            return injected
        lacking = max(0, self.num_groups * -(-tokens // self.description.block_size) - len(sequence.blocks))
        if lacking > self.pool.available:
            self.ran_out += 1
            return SequenceFault.NO_BLOCKS
        sequence.blocks += self.pool.take(lacking)
        return None

    def _compute(self, rows: list[_Row | None], columns: _Columns) -> None:
        """One forward pass."""
        columns.steps += 1
        columns.goes_on = [False] * len(rows)
        for entry, row in enumerate(rows):
            if row is None:
                continue
            tokens, finish = self._sample(row)
            row.sequence.steps -= 1
            if tokens or not row.samples:
                columns.computed[entry] += row.count
                columns.cached[entry] += row.cached
                columns.tokens[entry] += tokens
                columns.finishes[entry] = finish
                columns.goes_on[entry] = bool(tokens) and finish == NONE
                self.pool.keep(row.sequence.blocks, row.sequence.tokens, row.start, row.start + row.count)
                self._leave_behind(row.sequence.blocks, row.start + row.count)
            self._let_go(row.sequence.admission.sequence_id, finished=finish != NONE)

    def _leave_behind(self, blocks: list[int], computed: int) -> None:
        """Lets go of what no token from position `computed` on sees, written block by block and position by position."""
        size = self.description.block_size
        for number, group in enumerate(self.description.block_groups):
            for place in range(len(blocks) // self.num_groups) if group.sliding_window else ():
                index, last = place * self.num_groups + number, (place + 1) * size - 1
                if place * size >= group.sinks and last <= computed - group.sliding_window and blocks[index] != GONE:
                    self.pool.let_go([blocks[index]])
                    blocks[index] = GONE

    def _report(self) -> Blocks:
        """The blocks as they stand after this plan, whatever the next has taken already: the most hopeful report allowed."""
        taken = self._prepared.taken if self._prepared is not None else 0
        blocks = self.blocks
        return Blocks(blocks.free + taken, blocks.cached, blocks.held - taken)

    def _sample(self, row: _Row) -> tuple[list[int], int]:
        """The tokens of one row and how its sequence ends; nothing for one that an earlier step has finished."""
        sequence = row.sequence
        if sequence.finished or not row.samples:
            return [], NONE
        sequence.sampling -= 1
        sampling = sequence.admission.sampling
        token = oracle.token(sampling.seed, sequence.num_output)
        sequence.tokens.append(token)
        if token == oracle.EOS or token in sampling.stop_token_ids:
            return [token], STOP
        full = sequence.num_output >= sampling.max_tokens or len(sequence.tokens) >= self.description.max_model_len
        return [token], LENGTH if full else NONE

    def _let_go(self, sequence_id: int, *, finished: bool = False, released: bool = False) -> None:
        """The blocks of a sequence that is finished or released are free once no prepared step uses them."""
        sequence = self._sequences.get(sequence_id)
        if sequence is None:
            return
        sequence.finished |= finished
        sequence.released |= released
        if (sequence.finished or sequence.released) and sequence.steps == 0:
            self.pool.let_go(self._sequences.pop(sequence_id).blocks)
