"""What goes into the core (events) and what comes out (effects), with the plans and results of the plan protocol.

All frozen, none with behaviour. One file, long as it is: this is the core's whole language, read from end to end. Must not know:
protobuf, SQL, asyncio. Times are Unix seconds, passed in by the caller.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from tokenmill_scheduler.core.quotas import Quota
from tokenmill_scheduler.core.request import FinishReason, Request, Sampling, State

# ---- the plan protocol ---------------------------------------------------------------------------------------------------------

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
    `after_all_steps`: who sends a plan may have it wait for the one ahead; it is planned as if that could always be cut short.
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

    `token_ids` holds all sampled tokens, `num_sampled[i]` of them for row i. `logprobs[i]`, where the sequence of row i asked, has
    one entry for each of its sampled tokens. `faults` is keyed by sequence id.

    `num_cached`, tokens that came from the prefix cache beside those computed, may be empty when all are 0. `dropped` and then
    `stored` are hashes of blocks that left and entered that cache.
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
    epoch_seen: int = 0
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


# ---- events --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Submitted:
    """A durable request. `output` is not empty, or `state` not WAITING, when it is taken up again after a restart.

    `choices` are further choices of the same request that wait as it does: all are admitted together. `losses`: so many executors
    it is suspected to have cost another scheduler that has given it away.
    """

    request: Request
    output: tuple[int, ...] = ()
    state: State = State.WAITING
    choices: tuple[Request, ...] = ()
    losses: int = 0


@dataclass(frozen=True, slots=True)
class Cancelled:
    request_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Expired:
    """The shell's own time limit for a request has passed: it ends as EXPIRED with its tokens so far."""

    request_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Updated:
    """New priority or deadline of a waiting or running request; None leaves it. Event and, when it applied, effect."""

    request_id: str
    priority: int | None = None
    deadline_s: float | None = None


@dataclass(frozen=True, slots=True)
class TextStop:
    """The text layer found a stop string: of the tokens sampled in this result keep the first `keep`, and end with STOP."""

    keep: int


@dataclass(frozen=True, slots=True)
class ResultArrived:
    """`text_stops` is keyed by sequence id."""

    executor: str
    result: Result
    text_stops: Mapping[int, TextStop] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ExecutorJoined:
    """`stored`: hashes of the blocks in its prefix cache, as far as it has told.

    `epoch_seen` is the highest epoch that the process knew of before: a new process knows of none.
    """

    executor: ExecutorDescription
    epoch: int
    blocks: Blocks
    stored: tuple[int, ...] = ()
    epoch_seen: int = 0


@dataclass(frozen=True, slots=True)
class ExecutorLost:
    """`lives`: it is known to be well, and only no longer ours: nothing it ran is suspected."""

    executor: str
    epoch: int
    reason: str
    lives: bool = False


@dataclass(frozen=True, slots=True)
class ExecutorsAwaited:
    """Of the executors to be driven, the addresses of those that have not been here yet: what they can hold is not known."""

    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ExecutorGone:
    """Another scheduler's from here on."""

    executor: ExecutorDescription


@dataclass(frozen=True, slots=True)
class KnownExecutor:
    """An executor of any scheduler of the database; `elsewhere`: another one has it connected."""

    description: ExecutorDescription
    elsewhere: bool


@dataclass(frozen=True, slots=True)
class ExecutorsKnown:
    """All executors that schedulers of the database drive or wait for, those here among them, if they were ever connected."""

    executors: tuple[KnownExecutor, ...]


@dataclass(frozen=True, slots=True)
class HandedOver:
    """These requests, which wait, are another scheduler's from here on: nothing more of them is decided here."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class QueuePaused:
    """No waiting request is admitted until QueueResumed; those that have run go on. `why` is shown to those who wait."""

    why: str


@dataclass(frozen=True, slots=True)
class QueueResumed: ...


@dataclass(frozen=True, slots=True)
class ExecutorDrained:
    """What runs on this executor moves off it, and it admits nothing until ExecutorUndrained, however often it joins anew."""

    executor: str
    why: str


@dataclass(frozen=True, slots=True)
class ExecutorUndrained:
    executor: str


@dataclass(frozen=True, slots=True)
class QuotasChanged:
    """What tenants may use of the engine from now on; `default` is for those that `tenants` does not name."""

    default: Quota
    tenants: Mapping[str, Quota] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PlanDue:
    """The shell has room for one more plan at this executor now; answered with at most one PlanIssued.

    The plan may be of up to `max_steps`.
    """

    executor: str
    max_steps: int = 1


@dataclass(frozen=True, slots=True)
class PolicyChanged:
    """The order of all queues, from now on; `lane_shares` are per cent of the slots, in the order of `Lane`."""

    policy: str
    fair_share: bool
    lane_shares: tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class WeightsChanged:
    """What each tenant's fair share is in proportion to, where it is not 1."""

    weights: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed: deadlines are looked at."""


Event = (
    Submitted
    | Cancelled
    | Expired
    | Updated
    | ResultArrived
    | ExecutorJoined
    | ExecutorLost
    | ExecutorDrained
    | ExecutorUndrained
    | ExecutorsAwaited
    | ExecutorGone
    | ExecutorsKnown
    | HandedOver
    | QueuePaused
    | QueueResumed
    | QuotasChanged
    | PolicyChanged
    | WeightsChanged
    | PlanDue
    | Tick
)


# ---- effects -------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Transitioned:
    """A move between states, to be recorded. How it ended is said when `after` is terminal.

    `cached_tokens`, prompt tokens that were not computed when the request was first admitted, is told once, if there were any.
    """

    request_id: str
    before: State
    after: State
    at_s: float
    reason: str = ""
    executor: str = ""
    finish_reason: FinishReason | None = None
    error: str = ""
    error_code: int = 0
    cached_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class TokensGenerated:
    """Output of one step, to be recorded: columns, one entry for each request, tokens flat in `token_ids`.

    A terminal Transitioned of the same step follows it. `logprobs` is keyed by request id, one entry a token.
    """

    request_ids: tuple[str, ...]
    first_indexes: tuple[int, ...]
    counts: tuple[int, ...]
    token_ids: tuple[int, ...]
    at_s: float
    logprobs: Mapping[str, tuple[TokenLogprobs, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PlanIssued:
    """To be sent. Needs no commit first: what it leads to is told to a client only after its own commit."""

    executor: str
    plan: Plan


@dataclass(frozen=True, slots=True)
class OverloadChanged:
    """More or less work is held back from now on (see `overload.py`); `why` is empty when it is none. To be told, not recorded."""

    before: int
    after: int
    why: str
    at_s: float


Effect = Transitioned | TokensGenerated | Updated | PlanIssued | OverloadChanged
