"""Sequences that wait, in their slots, for blocks that another is on the way to compute, before the executor hears of them.

Choices of one request begin with the same prompt: one sequence computes it, the others take its full blocks by reference.

All are admitted at once, with a slot and blocks booked for each as if nothing were shared, so none of them can be left over. The
first computes the prompt; the executor hears of the others when its plans have brought the first so far that the blocks are there.
If the first is given up before, the next one leads. What an executor does not share after all it computes: a plan says "at most".

Requests that begin alike are not known to the executor to do so: they wait until the blocks are planned to be in the prefix cache
(`coming.py` knows who computes them), or whoever was to compute them is given up.

Must not know: the queue, policies, the pool.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeGuard

from tokenmill_scheduler.core.executor import ExecutorState
from tokenmill_scheduler.core.plans import Admission
from tokenmill_scheduler.core.sequence import Sequence


def shareable(num_tokens: int, block_size: int) -> int:
    """Of so many prompt tokens, those in blocks that can be shared: full ones, and not the last token, which each computes."""
    return (num_tokens - 1) // block_size * block_size


def waits(sequence: Sequence, executor: ExecutorState) -> bool:
    """Whether a sequence that the executor has not heard of waits for blocks. To be asked before a plan is booked."""
    lead = _lead(sequence, executor)
    if lead is not sequence:
        return _is_behind(lead, _shareable(sequence, executor))
    return _leads(sequence.lead, executor) and _is_behind(sequence.lead, sequence.shared)


def introduction(sequence: Sequence, executor: ExecutorState) -> Admission:
    """Makes the sequence known to the executor, in the plan that advances it first, and foretells what it need not compute."""
    admission = sequence.admission
    assert admission is not None
    sequence.admission = None
    lead, share = _lead(sequence, executor), _shareable(sequence, executor)
    if lead is not sequence and share:
        sequence.predicted = max(sequence.predicted, share)
        return replace(admission, fork_of=lead.sequence_id)
    if lead is sequence and sequence.lead is not None:
        assert sequence.live is not None
        sequence.predicted = max(executor.mirror.hit(sequence.live), sequence.shared if _leads(sequence.lead, executor) else 0)
    return admission


def _lead(sequence: Sequence, executor: ExecutorState) -> Sequence:
    """The first of its siblings that is left, maybe itself."""
    return next((sibling for sibling in sequence.siblings if sibling.sequence_id in executor.running), sequence)


def _leads(lead: Sequence | None, executor: ExecutorState) -> TypeGuard[Sequence]:
    """Whether there is one, and it has not been given up."""
    return lead is not None and lead.sequence_id in executor.running


def _is_behind(lead: Sequence, count: int) -> bool:
    """Whether fewer tokens of it will be computed once the plans that are out have been carried out."""
    return lead.planned_computed + lead.predicted < count


def _shareable(sequence: Sequence, executor: ExecutorState) -> int:
    """Nothing of a prompt that outgrows a window: its first blocks have gone back to the pool when the last are computed."""
    description = executor.description
    if any(0 < group.sliding_window < sequence.known for group in description.block_groups):
        return 0
    return shareable(sequence.known, description.block_size)
