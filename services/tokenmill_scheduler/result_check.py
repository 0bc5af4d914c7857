"""What an executor may answer to a plan: a result outside it ends the epoch, before it can reach a request or the books.

The arithmetic is that of docs/plan-protocol.md, from what went out in this epoch alone.

Must not know: the core's state, connections.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import gt

from tokenmill_scheduler.core.plans import Admission, Blocks, ExecutorDescription, Plan, Result, SequenceFault, SequenceFinish
from tokenmill_scheduler.wire import ExecutorFacts, ProtocolError


@dataclass(slots=True)
class _Tokens:
    """Of one sequence as results have told it: it ends at `limit` known tokens, and the last one known is never computed."""

    known: int
    limit: int
    computed: int = 0

    @classmethod
    def of(cls, admission: Admission, description: ExecutorDescription) -> _Tokens:
        limit = min(admission.num_prompt_tokens + admission.sampling.max_tokens, description.max_model_len)
        return cls(len(admission.token_ids), limit)


class ResultCheck:
    """Of one epoch: it is told of each plan that is `sent`, and checks the answers in the order of the plans."""

    def __init__(self, facts: ExecutorFacts) -> None:
        self._description = facts.description
        self._vocab_size = facts.vocab_size
        self._sequences: dict[int, _Tokens] = {}

    def sent(self, plan: Plan) -> None:
        for admission in plan.admit:
            self._sequences[admission.sequence_id] = _Tokens.of(admission, self._description)

    def check(self, plan: Plan, result: Result, uncut: bool = False) -> None:
        """`result` answers `plan`; `uncut`: the one behind it is `after_all_steps`. Raises ProtocolError."""
        trouble = self._whole(plan, result) or self._rows(result) or (_cut_short(plan, result) if uncut else "")
        if trouble:
            raise ProtocolError(f"result {result.plan_id} {trouble}")
        for sequence_id, fault in result.faults.items():
            if fault.fault is not SequenceFault.NO_BLOCKS:
                self._sequences.pop(sequence_id, None)
        for sequence_id in plan.release:
            self._sequences.pop(sequence_id, None)

    def check_blocks(self, blocks: Blocks) -> str:
        """What is wrong with them; empty if nothing is."""
        there_are = self._description.num_blocks
        return "" if blocks.total == there_are else f"tells of {blocks.total} blocks, there are {there_are}"

    def _whole(self, plan: Plan, result: Result) -> str:
        if result.sequence_ids != plan.advance_sequence_ids:
            return "has other rows than its plan"
        if any(map(gt, result.num_computed, plan.advance_max_tokens)):
            return "has a sequence that computed more tokens than it was to"
        if result.num_steps > plan.max_steps:
            return f"took {result.num_steps} steps, {plan.max_steps} were the most"
        if result.token_ids and max(result.token_ids) >= self._vocab_size:
            return f"has token {max(result.token_ids)}, the vocabulary has {self._vocab_size}"
        return self.check_blocks(result.blocks)

    def _rows(self, result: Result) -> str:
        cached = result.num_cached or (0,) * len(result.num_computed)
        rows = zip(result.sequence_ids, result.num_computed, cached, result.num_sampled, result.finishes, strict=True)
        for sequence_id, num_computed, num_cached, num_sampled, finish in rows:
            if not (num_computed or num_cached or num_sampled or finish):
                continue
            tokens = self._sequences.get(sequence_id)
            if tokens is None:
                return f"advances sequence {sequence_id}, which had ended"
            tokens.computed += num_computed + num_cached
            tokens.known += num_sampled
            if tokens.computed >= tokens.known:
                return f"has {tokens.computed} tokens of sequence {sequence_id} computed, {tokens.known} are known"
            if tokens.known > tokens.limit or (tokens.known == tokens.limit and not finish):
                return f"has sequence {sequence_id} go on at {tokens.known} tokens, its limit is {tokens.limit}"
            if finish == SequenceFinish.LENGTH and tokens.known < tokens.limit:
                return f"ends sequence {sequence_id} for its length at {tokens.known} tokens, its limit is {tokens.limit}"
            if finish:
                del self._sequences[sequence_id]
        return ""


def _cut_short(plan: Plan, result: Result) -> str:
    """Whether a sequence could have gone on, in a plan that was to take all its steps: others may have been given its slot."""
    if result.num_steps < plan.max_steps:
        columns = zip(result.sequence_ids, plan.advance_max_tokens, result.num_computed, result.finishes, strict=True)
        for sequence_id, most, num_computed, finish in columns:
            if 0 < num_computed < most and not finish and sequence_id not in result.faults:
                return f"took {result.num_steps} steps, and not all {plan.max_steps}"
    return ""
