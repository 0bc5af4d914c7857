"""What a desk answers with: frozen records. Must not know: protobuf, where it is from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tokenmill_service.histogram import Histogram

from tokenmill_scheduler.core.plans import Blocks, TokenLogprobs
from tokenmill_scheduler.core.request import FinishReason, Lane, State
from tokenmill_scheduler.ledger.records import StoredRequest
from tokenmill_scheduler.ordering_choice import OrderingChoice
from tokenmill_scheduler.text.model import TextModel


@dataclass(frozen=True, slots=True)
class ServedModel:
    """`pool_tokens` is the most tokens, prompt and output, that the largest pool serving it can hold."""

    name: str
    text: TextModel
    max_model_len: int
    vocab_size: int
    pool_tokens: int
    tokenizer_digest: str
    executors: int


@dataclass(frozen=True, slots=True)
class Submitted:
    request_id: str
    joined: bool


@dataclass(frozen=True, slots=True)
class Chunk:
    """Committed output tokens, at least one; `logprobs` empty or one a token."""

    first_index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Ended:
    state: State
    finish_reason: FinishReason
    num_output_tokens: int
    error: str = ""
    error_code: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class RequestStatus:
    """A stored request with what only the running loop knows."""

    stored: StoredRequest
    wait_reason: str = ""
    wait_code: str = ""


@dataclass(frozen=True, slots=True)
class Cancellation:
    """`already_ended`: the call cancelled nothing. Of several choices `state` is CANCELLED when one is, else that of the first."""

    state: State
    already_ended: bool


@dataclass(frozen=True, slots=True)
class ExecutorStatus:
    name: str
    address: str
    model: str
    connected: bool
    epoch: int
    device: str
    block_size: int
    blocks: Blocks
    running: int
    steps: int
    idle_share: float
    joined_s: float | None
    draining: bool = False
    scheduler: str = ""

    @classmethod
    def absent(cls, name: str) -> ExecutorStatus:
        """Of one that has not joined since the scheduler started: its name is all that is known."""
        return cls(name, "", "", False, 0, "", 0, Blocks(0, 0, 0), 0, 0, 0.0, None)


@dataclass(frozen=True, slots=True)
class LaneLoad:
    """`oldest_wait_s` is 0 when none waits."""

    lane: Lane
    running: int
    waiting: int
    oldest_wait_s: float


@dataclass(frozen=True, slots=True)
class Load:
    """Counters since the scheduler started, gauges as they stand. Field meanings: `tokenmill.admin.v1.GetLoadResponse`.

    `queue_paused` says by whom and why it is, empty when it is not.
    """

    num_requests_running: int
    num_requests_waiting: int
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_cache_usage: float
    batch_occupancy: float
    preemptions: int
    output_tokens: int
    prompt_tokens: int
    steps: int
    stale_results: int
    no_blocks: int
    ledger_backlog: int
    batching: str
    policy: str
    queue_paused: str = ""
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    recomputed_tokens: int = 0
    queued_tokens: int = 0
    overload_stage: int = 0
    overload_reason: str = ""
    overload_changes: int = 0
    lanes: tuple[LaneLoad, ...] = ()
    time_to_first_token: Histogram | None = None
    inter_token_latency: Histogram | None = None
    request_queue_time: Histogram | None = None
    batch_occupancy_sum: float = 0.0
    wait_reasons: Mapping[str, int] = field(default_factory=dict)
    streams_open: int = 0
    finished: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PolicyStatus:
    """The order in force; `why` says by whom and why it was set, empty when it is that of the settings."""

    choice: OrderingChoice
    why: str = ""
