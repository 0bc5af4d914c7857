"""What the engine is told and what it answers: the plan protocol as plain records.

Must not know: protobuf (`wire.py` translates), gRPC, runners. Columns are tuples or lists, so that they are cheap to build.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from enum import IntEnum

from tokenmill_executor.runner import SampledLogprobs, SamplingParams


class SequenceFinish(IntEnum):
    """Numbers equal those of the protocol's enum."""

    NONE = 0
    STOP = 1
    LENGTH = 2


class SequenceFault(IntEnum):
    """Numbers equal those of the protocol's enum."""

    NO_BLOCKS = 1
    TOO_LONG = 2
    ERROR = 3


@dataclass(frozen=True, slots=True)
class Admission:
    """Makes a sequence known. `token_ids` is the prompt, then the output made before.

    `fork_of`, when not 0, is a sequence of the same prompt, whose blocks of it can be shared.
    """

    sequence_id: int
    token_ids: SequenceOf[int]
    num_prompt_tokens: int
    params: SamplingParams
    cache_salt: str = ""
    fork_of: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """Release, then admit, then advance sequence i by at most `advance_max_tokens[i]` tokens towards its end.

    With `max_steps` above 1, those that have sampled go on, a token a step, as far as that allows. A plan that is `after_all_steps`
    does not cut the one ahead of it short.
    """

    epoch: int
    plan_id: int
    release: SequenceOf[int] = ()
    admit: SequenceOf[Admission] = ()
    advance_sequence_ids: SequenceOf[int] = ()
    advance_max_tokens: SequenceOf[int] = ()
    max_steps: int = 1
    after_all_steps: bool = False


@dataclass(frozen=True, slots=True)
class Fault:
    sequence_id: int
    fault: SequenceFault
    detail: str


@dataclass(frozen=True, slots=True)
class Blocks:
    """free + cached + held = all blocks of the pool."""

    free: int
    cached: int
    held: int


@dataclass(frozen=True, slots=True)
class PrefixChanges:
    """Of the prefix index, to be applied in this order: hashes dropped, then hashes stored, each with its parent's (0: none)."""

    dropped: SequenceOf[int] = ()
    stored: SequenceOf[int] = ()
    parents: SequenceOf[int] = ()


@dataclass(frozen=True, slots=True)
class Standing:
    """What a new epoch begins with: no sequence, these blocks, and, as changes to nothing, what is indexed."""

    blocks: Blocks
    prefix: PrefixChanges = PrefixChanges()


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds that carrying out one plan took, all its steps together."""

    prepare_s: float
    forward_s: float
    sample_s: float


@dataclass(frozen=True, slots=True)
class Result:
    """Answers one plan. Columns have one entry for each sequence the plan advanced, in its order.

    `token_ids` holds all sampled tokens, `num_sampled[i]` of them for sequence i. `logprobs` has one entry for each of those tokens
    whose sequence asked, in order. `num_cached`, of tokens taken from the prefix cache beside those computed, may be empty when all
    are 0.
    """

    epoch: int
    plan_id: int
    sequence_ids: SequenceOf[int]
    num_computed: SequenceOf[int]
    num_sampled: SequenceOf[int]
    token_ids: SequenceOf[int]
    finishes: SequenceOf[int]
    blocks: Blocks
    times: StepTimes
    faults: SequenceOf[Fault] = field(default=())
    logprobs: SequenceOf[SampledLogprobs] = field(default=())
    num_cached: SequenceOf[int] = field(default=())
    prefix: PrefixChanges = PrefixChanges()
    num_steps: int = 1
