"""A sequence: a request's tokens inside the executor.

Must not know: requests, plans, runners' insides. It lives from its admission until it ends, is at fault or is released.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from tokenmill_executor.block_table import BlockTable
from tokenmill_executor.records import Admission, SequenceFinish
from tokenmill_executor.runner import SamplingInput, SamplingParams

MAX_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds a sequence: the model's vocabulary, length and end-of-sequence tokens."""

    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]


class Sequence:
    """`token_ids` are all known tokens; K and V of the first `computed` of them are in the cache, in the blocks of `table`.

    `digests` are those of its first full blocks, as many as were wanted so far, chained to the prefix cache's `root`. `fork_of`
    names a sequence that has the same prompt; 0: none.
    """

    __slots__ = ("_end_len", "computed", "digests", "fork_of", "root", "sampling", "sequence_id", "table", "token_ids")

    def __init__(self, admission: Admission, limits: Limits, table: BlockTable, root: bytes = b"") -> None:
        params = admission.params
        self.sequence_id = admission.sequence_id
        self.token_ids = list(admission.token_ids)
        self.computed = 0
        self.table = table
        self.root = root
        self.fork_of = admission.fork_of
        self.digests: list[bytes] = []
        ends = frozenset(params.stop_token_ids) | frozenset(() if params.ignore_eos else limits.eos_token_ids)
        # Shares the list `token_ids`, so one object serves every step.
        self.sampling = SamplingInput(self.sequence_id, self.token_ids, admission.num_prompt_tokens, params, ends)
        self._end_len = min(admission.num_prompt_tokens + params.max_tokens, limits.max_model_len)

    @property
    def tokens_left(self) -> int:
        """Most that it samples until it ends."""
        return self._end_len - len(self.token_ids)

    def take(self, token_ids: SequenceOf[int]) -> tuple[SequenceOf[int], SequenceFinish]:
        """Takes sampled tokens up to the one that ends it. → those, and how it ends. A stop token in the last place is STOP."""
        left, ends = self.tokens_left, self.sampling.ends
        taken = token_ids[:left]
        finish = SequenceFinish.LENGTH if len(taken) == left else SequenceFinish.NONE
        if not ends.isdisjoint(taken):
            finish = SequenceFinish.STOP
            taken = taken[: 1 + next(place for place, token_id in enumerate(taken) if token_id in ends)]
        self.token_ids += taken
        return taken, finish


def admission_error(admission: Admission, limits: Limits) -> str | None:
    """Why this sequence cannot be admitted, None if it can."""
    count = len(admission.token_ids)
    if not 1 <= admission.num_prompt_tokens <= count:
        return f"num_prompt_tokens is {admission.num_prompt_tokens}, of {count} tokens"
    if count >= limits.max_model_len:
        return f"{count} tokens leave no room for one more within max_model_len {limits.max_model_len}"
    if not _in_vocabulary(admission.token_ids, limits.vocab_size):
        return f"token_ids has a token outside the vocabulary of {limits.vocab_size}"
    if count - admission.num_prompt_tokens >= admission.params.max_tokens:
        return f"{count - admission.num_prompt_tokens} output tokens are there already, max_tokens is {admission.params.max_tokens}"
    return _sampling_error(admission.params, limits.vocab_size)


def _sampling_error(params: SamplingParams, vocab_size: int) -> str | None:
    if not _in_vocabulary(params.stop_token_ids, vocab_size):
        return f"stop_token_ids has a token outside the vocabulary of {vocab_size}"
    if not _in_vocabulary((token for token, _ in params.logit_bias), vocab_size):
        return f"logit_bias_ids has a token outside the vocabulary of {vocab_size}"
    if params.logprobs is not None and params.logprobs > MAX_LOGPROBS:
        return f"logprobs is {params.logprobs}, at most {MAX_LOGPROBS} are given"
    for name, low, high in _RANGES:
        value = getattr(params, name)
        if not low <= value <= high:
            return f"{name} is {value}, not within {low:g} and {high:g}"
    if not params.top_p > 0 or not params.repetition_penalty > 0:
        return "top_p and repetition_penalty must be above 0"
    if not all(math.isfinite(bias) for _, bias in params.logit_bias):
        return "logit_bias_values has a value that is not finite"
    return None


# The scheduler has validated these for its clients; here they keep one bad number from spoiling a batch. NaN is in no range.
_LARGEST = float.fromhex("0x1.fffffep+127")  # of a float in the protocol
_RANGES = (
    ("temperature", 0.0, _LARGEST),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("repetition_penalty", 0.0, _LARGEST),
    ("presence_penalty", -_LARGEST, _LARGEST),
    ("frequency_penalty", -_LARGEST, _LARGEST),
)


def _in_vocabulary(token_ids: Iterable[int], vocab_size: int) -> bool:
    tokens = list(token_ids)
    return not tokens or (min(tokens) >= 0 and max(tokens) < vocab_size)
