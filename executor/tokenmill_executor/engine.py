"""Carries out plans: release, admit, advance, collect. Owns the sequences and, through `SequenceBlocks`, the KV blocks.

Must not know: gRPC, protobuf, epochs, what a runner does inside. One thread uses it; a plan at fault in one sequence is carried out
for all the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf

from tokenmill_executor.batch import Advance, build_batch
from tokenmill_executor.blocks import BlockPool
from tokenmill_executor.columns import Columns
from tokenmill_executor.host_tier import HostTier
from tokenmill_executor.interrupt import Interrupt
from tokenmill_executor.parts import Part, Sampled, compute_in_parts
from tokenmill_executor.prefix import PrefixHasher
from tokenmill_executor.records import Admission, Blocks, Fault, Plan, Result, SequenceFault, SequenceFinish, Standing, StepTimes
from tokenmill_executor.runner import Runner
from tokenmill_executor.sequence_blocks import SequenceBlocks
from tokenmill_executor.sequences import Limits, Sequence, admission_error

# Known sequences beyond those of one step: a scheduler admits what it soon advances, so more than this is its mistake.
_KNOWN_PER_STEP = 8


class Engine:
    def __init__(
        self,
        runner: Runner,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        clock: Callable[[], float] = time.perf_counter,
        hasher: PrefixHasher | None = None,
        num_host_blocks: int = 0,
    ) -> None:
        """Makes the runner allocate its cache, and host memory for evicted blocks. Without a `hasher` no prefix is cached."""
        assert hasher is not None or num_host_blocks == 0, "the host tier is part of the prefix cache"
        runner.allocate(num_blocks, block_size)
        self._runner = runner
        host = HostTier(runner.host_memory(num_host_blocks), num_host_blocks, block_size) if num_host_blocks else None
        self._blocks = SequenceBlocks(BlockPool(num_blocks, block_size, runner.description.block_groups, host), hasher, host)
        self._sequences: dict[int, Sequence] = {}
        self._most_known = _KNOWN_PER_STEP * max_num_seqs
        description = runner.description
        self._limits = Limits(description.vocab_size, description.max_model_len, description.eos_token_ids)
        self._clock = clock

    def carry_out(self, plan: Plan, interrupt: Interrupt | None = None) -> Result:
        """One step, and further ones as far as the plan allows, until the `interrupt` asks for no more.

        What is wrong with a single sequence is a fault in the result. Raises only DeviceLost, after which nothing can be carried
        out, and for a mistake of this executor.
        """
        started_s = self._clock()
        columns = Columns.of(len(plan.advance_sequence_ids))
        self._release(plan.release)
        self._admit(plan.admit, columns.faults)
        advances = self._reserve(plan, columns.faults)
        interrupt = interrupt or Interrupt()
        self._take_steps(plan, advances, columns, interrupt)
        while columns.steps < plan.max_steps and not interrupt.is_asked() and (advances := self._go_on(plan, advances, columns)):
            self._take_steps(plan, advances, columns, interrupt)
        prepare_s = max(0.0, self._clock() - started_s - columns.forward_s - columns.sample_s)
        return Result(
            epoch=plan.epoch,
            plan_id=plan.plan_id,
            sequence_ids=plan.advance_sequence_ids,
            num_computed=columns.num_computed,
            num_sampled=columns.num_sampled,
            token_ids=columns.token_ids,
            finishes=columns.finishes,
            blocks=self._blocks.counts(),
            times=StepTimes(prepare_s, columns.forward_s, columns.sample_s),
            faults=columns.faults,
            logprobs=columns.logprobs,
            num_cached=columns.num_cached if any(columns.num_cached) else (),
            prefix=self._blocks.take_changes(),
            num_steps=columns.steps,
        )

    def populate_some(self) -> bool:
        """Some ms of work that a step would else do before it can write to blocks never used before. False: there is none left."""
        return self._runner.populate_some()

    def release_all(self) -> Standing:
        """Forgets every sequence, for a scheduler that knows nothing yet. No block is held then; the cached ones stay."""
        for sequence in list(self._sequences.values()):
            self._drop(sequence)
        self.check()
        self._blocks.pool.index.tell_all()
        return Standing(self._blocks.counts(), self._blocks.take_changes())

    @property
    def blocks(self) -> Blocks:
        return self._blocks.counts()

    @property
    def host_tier(self) -> HostTier | None:
        """For its figures, which may be asked on any thread."""
        return self._blocks.host

    @property
    def evicted_blocks(self) -> int:
        """Cached blocks taken for other use, so far. May be asked on any thread."""
        return self._blocks.pool.index.evictions

    def check(self) -> None:
        """Raises AssertionError unless blocks and references agree with the sequences. O(blocks): for tests and idle times."""
        self._blocks.check(self._sequences.values())

    # ---- the four parts --------------------------------------------------------------------------------------------------------

    def _release(self, sequence_ids: Iterable[int]) -> None:
        for sequence_id in sequence_ids:
            sequence = self._sequences.get(sequence_id)
            if sequence is not None:
                self._drop(sequence)

    def _admit(self, admissions: Iterable[Admission], faults: list[Fault]) -> None:
        for admission in admissions:
            known = self._sequences.get(admission.sequence_id)
            if known is not None:
                # Two sequences under one name: no token of either could be trusted.
                self._fail(known, SequenceFault.ERROR, "admitted again while it was known", faults)
                continue
            error = admission_error(admission, self._limits)
            if error is None and len(self._sequences) >= self._most_known:
                error = f"more than {self._most_known} sequences are known"
            if error is not None:
                faults.append(Fault(admission.sequence_id, SequenceFault.ERROR, error))
                continue
            root = self._blocks.root(admission.cache_salt)
            self._sequences[admission.sequence_id] = Sequence(admission, self._limits, self._blocks.new_table(), root)

    def _reserve(self, plan: Plan, faults: list[Fault]) -> list[Advance]:
        """Takes the blocks that this step writes to, sequence after sequence in plan order; those that get none stay behind."""
        advances = []
        for entry, (sequence_id, most) in enumerate(zip(plan.advance_sequence_ids, plan.advance_max_tokens, strict=True)):
            sequence = self._sequences.get(sequence_id)
            if sequence is None or most < 1:
                continue
            start, kept = sequence.computed, 0
            if start == 0:
                start = self._blocks.share(sequence, self._sequences.get(sequence.fork_of))
                kept = self._blocks.worth_bringing_back(sequence)
                start += kept * self._blocks.block_size
            end = min(start + most, len(sequence.token_ids))
            if self._take_blocks(sequence, end, kept, faults):
                advances.append(Advance(entry, sequence, start, end))
            elif sequence.computed == 0:
                # All or nothing: what it shares must not stay pinned while it waits.
                self._blocks.give_back(sequence)
        return advances

    def _go_on(self, plan: Plan, before: SequenceOf[Advance], columns: Columns) -> list[Advance]:
        """A token more for those that have sampled in the step `before`, and have tokens left of the plan's most."""
        advances = []
        for advance in before:
            entry, sequence = advance.entry, advance.sequence
            start, left = sequence.computed, plan.advance_max_tokens[entry] - columns.num_computed[entry]
            if left < 1 or start != len(sequence.token_ids) - 1 or sequence.sequence_id not in self._sequences:
                continue
            if self._take_blocks(sequence, start + 1, 0, columns.faults):
                advances.append(Advance(entry, sequence, start, start + 1))
        return advances

    def _take_blocks(self, sequence: Sequence, end: int, kept: int, faults: list[Fault]) -> bool:
        fault = self._blocks.take(sequence, end, kept)
        if fault is None:
            return True
        faults.append(fault)
        if fault.fault is SequenceFault.TOO_LONG:
            self._drop(sequence)
        return False

    def _take_steps(self, plan: Plan, advances: SequenceOf[Advance], columns: Columns, interrupt: Interrupt) -> None:
        """One, or as many as all of `advances` can take one after another."""
        most = self._reserve_ahead(plan, advances, columns)
        self._blocks.make_room()
        taken = 1
        for part in compute_in_parts(lambda some, most: self._compute(some, most, interrupt), advances, most):
            for output in part.outputs:
                columns.forward_s += output.forward_s
                columns.sample_s += output.sample_s
            taken = max(taken, len(part.outputs))
            self._collect(part, columns)
        columns.steps += taken

    def _reserve_ahead(self, plan: Plan, advances: SequenceOf[Advance], columns: Columns) -> int:
        """Steps that all can take together, the next one among them, and takes the blocks that these write to.

        More than one only where all decode, and only as many as end no sequence before the last.
        """
        most = plan.max_steps - columns.steps
        for advance in advances:
            entry, sequence = advance.entry, advance.sequence
            if most <= 1 or advance.start != len(sequence.token_ids) - 1:
                return 1
            most = min(most, plan.advance_max_tokens[entry] - columns.num_computed[entry], sequence.tokens_left)
        ends = [(advance.sequence, advance.end + most - 1) for advance in advances]
        return most if self._blocks.take_for_all(ends) else 1

    def _compute(self, advances: SequenceOf[Advance], most: int, interrupt: Interrupt) -> Part:
        batch = build_batch(advances, self._blocks.block_size, self._blocks.pool.num_groups)
        outputs = [self._runner.step(batch)] if most == 1 else self._runner.steps(batch, most, interrupt)
        # Only steps that are mostly chunks tell what a token more costs: decodes take their time whether they are few or many.
        if (host := self._blocks.host) is not None and len(batch.token_ids) >= 2 * len(batch.context_lens):
            host.computed(len(batch.token_ids), outputs[0].forward_s)
        return Part(advances, batch.sample_rows.tolist(), outputs)

    def _collect(self, part: Part, columns: Columns) -> None:
        if part.error:
            self._fail(part.advances[0].sequence, SequenceFault.ERROR, part.error, columns.faults)
            return
        samples = dict(zip(part.sample_rows, part.tokens_by_sample(), strict=True))
        for row, advance in enumerate(part.advances):
            if row in samples:
                self._collect_tokens(advance, samples[row], columns)
            else:
                self._keep(advance, advance.end, columns)

    def _collect_tokens(self, advance: Advance, sampled: Sampled, columns: Columns) -> None:
        """Of one sequence, up to its end: what later steps say of it means nothing."""
        sequence = advance.sequence
        taken, finish = sequence.take(sampled.token_ids)
        columns.sampled(advance.entry, taken, sampled.logprobs[: len(taken)])
        # What a sequence at fault has computed is not to be trusted, least of all by others.
        if taken:
            self._keep(advance, advance.end + len(taken) - 1, columns)
        if finish is not SequenceFinish.NONE:
            columns.finishes[advance.entry] = finish
            self._drop(sequence)
        elif sampled.error:
            self._fail(sequence, SequenceFault.ERROR, sampled.error, columns.faults)

    def _keep(self, advance: Advance, end: int, columns: Columns) -> None:
        """What was computed, up to position `end`, counts from now on."""
        columns.num_cached[advance.entry] += advance.start - advance.sequence.computed
        columns.num_computed[advance.entry] += end - advance.start
        self._blocks.keep(advance.sequence, advance.start, end)

    # ---- the end of a sequence -------------------------------------------------------------------------------------------------

    def _fail(self, sequence: Sequence, fault: SequenceFault, detail: str, faults: list[Fault]) -> None:
        faults.append(Fault(sequence.sequence_id, fault, detail))
        self._drop(sequence)

    def _drop(self, sequence: Sequence) -> None:
        self._blocks.give_back(sequence)
        del self._sequences[sequence.sequence_id]
