"""A model executor: carries out plans as the plan protocol says, in no time, and says how long a real one would have taken.

What it knows of its sequences are columns by sequence id, so that a step costs the same few array operations whatever its size.
A sequence makes as many tokens as its request's seed says; all are token 0. Must not know: requests, the clock, the core's state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from tokenmill_scheduler.core.mirror import BlockHashes
from tokenmill_scheduler.core.plans import (
    Admission,
    ExecutorDescription,
    Fault,
    Plan,
    Result,
    SequenceFault,
    SequenceFinish,
    StepTimes,
)

from tokenmill_simulator.cache import BlockCache
from tokenmill_simulator.cost import StepCost, StepLoad

Ints = NDArray[np.int64]
# Columns: tokens there are; of those, computed; tokens at its end, 0 once it has ended; blocks it has.
_KNOWN, _COMPUTED, _LAST, _BLOCKS = range(4)
_NO_BLOCKS = Fault(SequenceFault.NO_BLOCKS, "the simulated pool has none")


@dataclass(slots=True)
class _Prefix:
    """Of a sequence where prefixes are cached: hashes of its prompt's full blocks; how many it has filled; those it shares."""

    hashes: Sequence[int]
    filled: int
    shared: list[int]


class ModelExecutor:
    """`output_tokens` has for each seed how many tokens its request makes before the model ends it.

    Steps go on one after the other: `step` is called once for each plan, in order.
    """

    def __init__(self, description: ExecutorDescription, cost: StepCost, output_tokens: Sequence[int]) -> None:
        self.description = description
        self.cache = BlockCache(description.num_blocks, description.num_host_blocks)
        self._cost = cost
        self._output_tokens = output_tokens
        self._columns: Ints = np.zeros((4, 1024), dtype=np.int64)
        self._admissions: dict[int, Admission] = {}
        self._prefixes: dict[int, _Prefix] = {}
        self._filling: dict[int, _Prefix] = {}

    def step(self, plan: Plan) -> tuple[Result, float]:
        """The answer to a plan, and the seconds it takes."""
        for sequence_id in plan.release:
            self._let_go(sequence_id)
        for admission in plan.admit:
            self._admit(admission)
        ids: Ints = np.array(plan.advance_sequence_ids, dtype=np.int64)
        cached, copied = self._start(plan) if self.description.caches_prefixes and plan.admit else ({}, 0)
        columns = self._columns
        known, last = columns[_KNOWN, ids], columns[_LAST, ids]
        start = columns[_COMPUTED, ids]
        counts = np.minimum(np.array(plan.advance_max_tokens, dtype=np.int64), known - start)
        counts[last == 0] = 0
        faults = self._take_blocks(ids, start, counts)
        end = start + counts
        samples = (end == known) & (counts > 0)
        columns[_COMPUTED, ids] = end
        columns[_KNOWN, ids] = known + samples
        ended = samples & (known + 1 >= last)
        load = step_load(start, counts)
        if copied:
            load = replace(load, copied_tokens=copied)
        self._fill()
        finishes = self._finish(ids, ended) if ended.any() else (0,) * len(ids)
        dropped, stored = self.cache.changes()
        seconds = self._cost.seconds(load)
        result = Result(
            plan.epoch,
            plan.plan_id,
            plan.advance_sequence_ids,
            tuple(counts.tolist()),
            tuple(samples.astype(np.int64).tolist()),
            (0,) * int(samples.sum()),
            finishes,
            self.cache.blocks(),
            faults,
            times=StepTimes(forward_us=round(seconds * 1e6)),
            num_cached=tuple([cached.get(i, 0) for i in plan.advance_sequence_ids]) if cached else (),
            dropped=dropped,
            stored=stored,
        )
        return result, seconds

    # ---- sequences -------------------------------------------------------------------------------------------------------------

    def _admit(self, admission: Admission) -> None:
        sequence_id, sampling = admission.sequence_id, admission.sampling
        while sequence_id >= self._columns.shape[1]:
            self._columns = np.concatenate((self._columns, np.zeros_like(self._columns)), axis=1)
        output = min(sampling.max_tokens, self._output_tokens[sampling.seed])
        last = min(admission.num_prompt_tokens + output, self.description.max_model_len)
        self._columns[:, sequence_id] = (len(admission.token_ids), 0, last, 0)
        self._admissions[sequence_id] = admission

    def _let_go(self, sequence_id: int) -> None:
        """One that is unknown has ended by itself."""
        if self._admissions.pop(sequence_id, None) is None:
            return
        prefix = self._prefixes.pop(sequence_id, None)
        self._filling.pop(sequence_id, None)
        shared = prefix.shared if prefix is not None else []
        self.cache.let_go(int(self._columns[_BLOCKS, sequence_id]) - len(shared), shared)
        self._columns[_LAST, sequence_id] = 0

    def _finish(self, ids: Ints, ended: NDArray[np.bool_]) -> tuple[int, ...]:
        finishes = [int(SequenceFinish.NONE)] * len(ids)
        for row in np.flatnonzero(ended).tolist():
            sequence_id = int(ids[row])
            admission = self._admissions[sequence_id]
            full = min(admission.num_prompt_tokens + admission.sampling.max_tokens, self.description.max_model_len)
            cut = self._columns[_KNOWN, sequence_id] >= full
            finishes[row] = int(SequenceFinish.LENGTH if cut else SequenceFinish.STOP)
            self._let_go(sequence_id)
        return tuple(finishes)

    # ---- blocks ----------------------------------------------------------------------------------------------------------------

    def _take_blocks(self, ids: Ints, start: Ints, counts: Ints) -> dict[int, Fault]:
        """The blocks for what each row computes; a row that there are none for computes nothing."""
        held = self._columns[_BLOCKS, ids]
        lacking = np.maximum(0, -(-(start + counts) // self.description.block_size) - held)
        total = int(lacking.sum())
        faults: dict[int, Fault] = {}
        if total > self.cache.available:
            over = np.flatnonzero(np.cumsum(lacking) > self.cache.available)
            over = over[lacking[over] > 0]
            faults = {int(ids[row]): _NO_BLOCKS for row in over.tolist()}
            counts[over] = 0
            lacking[over] = 0
            total = int(lacking.sum())
        if total:
            self.cache.take(total)
            self._columns[_BLOCKS, ids] = held + lacking
        return faults

    def _start(self, plan: Plan) -> tuple[dict[int, int], int]:
        """Looks the admitted sequences up in the cache; returns the tokens found for each, beyond what the plan has it compute, and
        how many of all have to come from the host's memory."""
        found: dict[int, int] = {}
        copied = 0
        size, version = self.description.block_size, self.description.cache_version
        assert version is not None, "the simulator knows the hashes of its blocks"
        for admission in plan.admit:
            full = admission.num_prompt_tokens // size
            hashes = BlockHashes(version, admission.cache_salt, size).first(full, admission.token_ids)
            # The last known token is always computed.
            most = min(full, (len(admission.token_ids) - 1) // size)
            hits = self.cache.pin(hashes[:most])
            back = self.cache.bring_back(hashes[hits:most])
            hits, copied = hits + back, copied + back * size
            prefix = _Prefix(hashes, hits, list(hashes[:hits]))
            self._prefixes[admission.sequence_id] = self._filling[admission.sequence_id] = prefix
            self._columns[_COMPUTED, admission.sequence_id] = hits * size
            self._columns[_BLOCKS, admission.sequence_id] = hits
            found[admission.sequence_id] = hits * size
        return found, copied

    def _fill(self) -> None:
        """Prompt blocks that this step has filled can be hit from now on; what a decode fills is nobody's prompt."""
        size = self.description.block_size
        for sequence_id, prefix in list(self._filling.items()):
            full = min(int(self._columns[_COMPUTED, sequence_id]) // size, len(prefix.hashes))
            if full > prefix.filled:
                prefix.shared += self.cache.keep(prefix.hashes[prefix.filled : full])
                prefix.filled = full
            if full == len(prefix.hashes):
                del self._filling[sequence_id]


def has_prefill(plan: Plan) -> bool:
    """Whether it has any sequence compute more than a token in a step."""
    return plan.max_steps == 1 and sum(plan.advance_max_tokens) > len(plan.advance_max_tokens)


def step_load(start: Ints, counts: Ints) -> StepLoad:
    """Of rows that compute so many tokens each, after so many others. A row of one token is a decode; longer ones are prefill."""
    decodes = counts == 1
    num_decodes = int(np.count_nonzero(decodes))
    end = start + counts
    if num_decodes == len(counts):
        return StepLoad(0, num_decodes, int(end.sum()), 0, 0)
    chunks, ends = counts[~decodes], end[~decodes]
    pairs = chunks * ends - chunks * (chunks - 1) // 2
    read = int(end[decodes].sum()) + int(ends[chunks > 0].sum())
    return StepLoad(int(chunks.sum()), num_decodes, read, int(pairs.sum()), int(np.count_nonzero(chunks)))
