"""What the core says to executors and hears from them: the plan protocol's messages as frozen records, see docs/plan-protocol.md.

The wire's own form is `wire.py`'s. Must not know: protobuf, what a request is beyond its sampling, events.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from tokenmill_scheduler.core.request import Sampling

# The highest that a database keeps: 64 bits with a sign.
MAX_EPOCH = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Admission:
    """Makes a sequence known to an executor. `token_ids` is the prompt, then the output made before.

    `fork_of`, when not 0, is a sequence of the same prompt, whose blocks of it can be shared.
    """

    sequence_id: int
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    sampling: Sampling
    cache_salt: str = ""
    fork_of: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """What one executor is to do: release, then admit, then advance each sequence by at most so many tokens towards its end.

    That is one step, or, of sequences that decode, up to `max_steps` of a token each, until another plan comes that is not
    `after_all_steps`: where it takes slots of sequences that the one ahead ends, and where who sends it lets that one finish.
    """

    epoch: int
    plan_id: int
    release: tuple[int, ...]
    admit: tuple[Admission, ...]
    advance_sequence_ids: tuple[int, ...]
    advance_max_tokens: tuple[int, ...]
    max_steps: int = 1
    after_all_steps: bool = False


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
class Fault:
    fault: SequenceFault
    detail: str


@dataclass(frozen=True, slots=True)
class Blocks:
    """free + cached + held = all blocks of the executor."""

    free: int
    cached: int
    held: int

    @property
    def available(self) -> int:
        """Blocks that a sequence can take: never used, or cached and unreferenced."""
        return self.free + self.cached

    @property
    def total(self) -> int:
        return self.free + self.cached + self.held


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Microseconds of all steps of a plan; see `tokenmill.executor.v1.Times`."""

    queue_us: int = 0
    prepare_us: int = 0
    forward_us: int = 0
    sample_us: int = 0
    idle_us: int = 0

    @property
    def steps_s(self) -> float:
        """Seconds that the steps themselves took."""
        return (self.prepare_us + self.forward_us + self.sample_us) / 1e6


@dataclass(frozen=True, slots=True)
class Result:
    """Answers one plan. Columns have one entry for each sequence the plan advanced, in its order.

    `token_ids` holds all sampled tokens, `num_sampled[i]` of them for row i. `finishes` has a SequenceFinish's number for each row.
    `logprobs` is keyed by row, where its sequence asked: an entry for each of its sampled tokens. `faults` is keyed by sequence id.

    `num_cached`, tokens that came from the prefix cache beside those computed, may be empty when all are 0. `dropped` and then
    `stored` are hashes of blocks that left and entered that cache. `num_steps` of the plan's steps were carried out.
    """

    epoch: int
    plan_id: int
    sequence_ids: tuple[int, ...]
    num_computed: tuple[int, ...]
    num_sampled: tuple[int, ...]
    token_ids: tuple[int, ...]
    finishes: tuple[int, ...]
    blocks: Blocks
    faults: Mapping[int, Fault] = field(default_factory=dict)
    logprobs: Mapping[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    times: StepTimes = StepTimes()
    num_cached: tuple[int, ...] = ()
    dropped: tuple[int, ...] = ()
    stored: tuple[int, ...] = ()
    num_steps: int = 1


@dataclass(frozen=True, slots=True)
class BlockGroup:
    """Layers that share blocks: a block holds `block_size` positions for those of one group.

    With a `sliding_window` (0: none) they see so many positions, and the first `sinks`; blocks that fall behind come back.
    """

    sliding_window: int = 0
    sinks: int = 0


FULL_ATTENTION = (BlockGroup(),)


@dataclass(frozen=True, slots=True)
class ExecutorDescription:
    """What the core needs to know of an executor to plan for it.

    `caches_prefixes`: sequences may start with tokens that others have computed. `cache_version` is what the hashes of its blocks
    begin with; None when they cannot be foretold. `num_host_blocks` hold such tokens beside the `num_blocks`, and nothing else.
    `multi_step`: a plan may be several steps.
    """

    name: str
    model: str
    block_size: int
    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    pipeline_depth: int = 2
    caches_prefixes: bool = False
    cache_version: str | None = None
    block_groups: tuple[BlockGroup, ...] = FULL_ATTENTION
    num_host_blocks: int = 0
    multi_step: bool = False
