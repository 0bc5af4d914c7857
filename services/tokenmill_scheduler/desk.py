"""The counter between the servicers, which speak protobuf, and the loop, which owns the core: what may be asked of a scheduler.

`service.Service` implements `Desk`; servicers know nothing else of it. Must not know: protobuf, SQL, the plan protocol.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, Self

from tokenmill_service.histogram import Histogram

from tokenmill_scheduler.core.plans import Blocks, TokenLogprobs
from tokenmill_scheduler.core.request import FinishReason, Lane, Request, State
from tokenmill_scheduler.ledger.records import (
    ActionPage,
    ActionQuery,
    RequestPage,
    RequestQuery,
    StoredOutput,
    StoredRequest,
    StoredTransition,
)
from tokenmill_scheduler.ordering_choice import OrderingChoice
from tokenmill_scheduler.text.model import TextModel


class DeskError(Exception):
    """Base of what a desk raises; `servicers/errors.py` maps each to a gRPC status."""


class UnknownRequest(DeskError):
    """No request has this id (NOT_FOUND)."""


class RequestExists(DeskError):
    """This id belongs to a request with another payload (ALREADY_EXISTS)."""


class UnknownModel(DeskError):
    """No executor has served this model (NOT_FOUND), or several models are served and none was named (INVALID_ARGUMENT)."""


class Refused(DeskError):
    """Base of refusals for want of room (RESOURCE_EXHAUSTED): `limit` names the setting that is at its end.

    Without a delay in seconds, coming again is of no use.
    """

    def __init__(self, message: str, retry_delay_s: float | None, limit: str) -> None:
        super().__init__(message)
        self.retry_delay_s = retry_delay_s
        self.limit = limit


class QueueFull(Refused):
    """The queue is at its limit, of requests or of tokens."""


class TenantLimit(Refused):
    """The tenant is at a limit or a quota of its own."""


class Overloaded(Refused):
    """There is too much work, and this lane is not taken until there is less."""


class Unavailable(DeskError):
    """The scheduler cannot accept now: no executor yet, ledger away, or shutting down (UNAVAILABLE with a retry delay)."""

    def __init__(self, message: str, retry_delay_s: float) -> None:
        super().__init__(message)
        self.retry_delay_s = retry_delay_s


class IndexAhead(DeskError):
    """Attach at an index beyond the tokens produced so far (OUT_OF_RANGE)."""


class UnknownExecutor(DeskError):
    """No executor of this name has joined (NOT_FOUND)."""


class RequestNotFailed(DeskError):
    """Only a FAILED request can be tried again (FAILED_PRECONDITION)."""


class RequestEnded(DeskError):
    """The change asked for needs a request that has not ended (FAILED_PRECONDITION)."""


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


class ChunkStream(Protocol):
    """Yields Chunks in index order without gap or repeat, coalescing what gathered while the reader was busy, then one Ended.

    `aclose` says that the reader leaves, also before the first item: for a request that is not detached, the last reader's leaving
    cancels it. Raises Unavailable when the scheduler shuts down; the reader may attach again.
    """

    def __aiter__(self) -> Self: ...

    async def __anext__(self) -> Chunk | Ended: ...

    async def aclose(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Attachment:
    """A stream of a request's committed tokens. `earlier` are those before the index asked for. Close `chunks` when done."""

    request: Request
    earlier: tuple[int, ...]
    chunks: ChunkStream


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


class Desk(Protocol):
    def model(self, name: str) -> ServedModel:
        """The model of this name, or the only one when `name` is empty. Raises UnknownModel, or Unavailable before any is known."""

    def models(self) -> tuple[ServedModel, ...]: ...

    def most_choices(self, model: str, num_prompt_tokens: int, max_tokens: int) -> int | None:
        """Of a prompt of so many tokens, the most that an executor can ever run at once; None if that is not known now."""

    async def submit(self, request: Request, payload_digest: bytes) -> Submitted:
        """Returns once the request is durable, with all its choices.

        Raises RequestExists, QueueFull, TenantLimit, Overloaded, Unavailable.
        """

    async def attach(self, request_id: str, next_index: int) -> Attachment:
        """To one request, or to one choice: the id of a request is that of its first. Raises UnknownRequest, IndexAhead."""

    async def attach_all(self, next_indexes: Mapping[str, int]) -> tuple[Attachment, ...]:
        """As `attach`, to all of them, each from an index on, or to none."""

    async def cancel(self, request_id: str, reason: str, actor: str = "") -> Cancellation:
        """Returns once it is durable. `actor` is the operator who does it, empty for the client.

        A request whose scheduler has fallen is waited for, here and in `update`, until another has taken it over. Raises
        UnknownRequest, Unavailable.

        The id of a request stands for all its choices here and in `update`, that of a further choice for it alone.
        """

    async def update(
        self, request_id: str, priority: int | None, deadline_s: float | None, reason: str = "", actor: str = ""
    ) -> RequestStatus:
        """Returns once it is durable. Raises UnknownRequest, RequestEnded, Unavailable."""

    async def retry(self, request_id: str, new_request_id: str, reason: str, actor: str) -> None:
        """Submits a FAILED request again under a new id; it runs detached. Returns once it is durable.

        Raises UnknownRequest, RequestNotFailed, QueueFull, Unavailable.
        """

    async def status(self, request_id: str) -> RequestStatus:
        """Raises UnknownRequest."""

    async def output(self, request_id: str) -> StoredOutput:
        """All output so far. Raises UnknownRequest."""

    async def transitions(self, request_id: str) -> tuple[StoredTransition, ...]:
        """Raises UnknownRequest."""

    async def query(self, query: RequestQuery) -> RequestPage:
        """Raises ValueError when the page token is not one it gave."""

    def standing(self, stored: StoredRequest) -> RequestStatus:
        """With why it waits, if it does."""

    def executors(self) -> tuple[ExecutorStatus, ...]: ...

    def load(self) -> Load: ...


class OperatorDesk(Protocol):
    """What operators hold back, and the record of what they did. A change returns once it is durable; all may raise Unavailable."""

    async def pause_queue(self, actor: str, reason: str) -> bool:
        """False when it was paused already."""

    async def resume_queue(self, actor: str, reason: str) -> bool:
        """False when it was not paused."""

    async def drain_executor(self, name: str, actor: str, reason: str) -> ExecutorStatus:
        """Raises UnknownExecutor."""

    async def undrain_executor(self, name: str, actor: str, reason: str) -> ExecutorStatus:
        """Raises UnknownExecutor."""

    def policy(self) -> PolicyStatus: ...

    async def set_policy(self, choice: OrderingChoice, actor: str, reason: str) -> bool:
        """False when it is in force already."""

    async def reset_policy(self, actor: str, reason: str) -> bool:
        """Back to that of the settings. False when none was set."""

    async def actions(self, query: ActionQuery) -> ActionPage:
        """Raises ValueError when the page token is not one it gave."""
