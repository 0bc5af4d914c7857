"""What operators are handed out, and what they filter by: frozen records. Must not know: protobuf, gRPC."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from tokenmill_client.records import Lane, RequestInfo, RequestState


@dataclass(frozen=True, slots=True)
class RequestFilter:
    """All conditions hold together; an empty or None one holds always. States and lanes can be given as words, too: "waiting"."""

    states: tuple[RequestState | str, ...] = ()
    tenant: str = ""
    min_priority: int | None = None
    max_priority: int | None = None
    model: str = ""
    lanes: tuple[Lane | str, ...] = ()
    # Accepted at least so many seconds ago.
    min_age: float | None = None


@dataclass(frozen=True, slots=True)
class Transition:
    """A move between states; `before` is None for the first."""

    before: RequestState | None
    after: RequestState
    at: datetime
    reason: str


@dataclass(frozen=True, slots=True)
class RequestLife:
    info: RequestInfo
    transitions: tuple[Transition, ...]


@dataclass(frozen=True, slots=True)
class CancelOutcome:
    """`state` is None when no request has this id."""

    request_id: str
    state: RequestState | None
    already_ended: bool
    not_found: bool


@dataclass(frozen=True, slots=True)
class Executor:
    """Meanings as in `tokenmill.admin.v1.Executor`; `idle_share` in 0 to 1."""

    name: str
    address: str
    model: str
    connected: bool
    epoch: int
    device: str
    block_size: int
    total_blocks: int
    free_blocks: int
    held_blocks: int
    cached_blocks: int
    running: int
    steps: int
    idle_share: float
    joined_at: datetime | None
    draining: bool
    scheduler: str


@dataclass(frozen=True, slots=True)
class Action:
    """Something an operator did; `target` is a request id or an executor's name, or empty for the queue."""

    at: datetime
    actor: str
    verb: str
    target: str
    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class LaneLoad:
    """`oldest_wait_s`, of the request in the queue that has waited longest, is 0 when none does."""

    lane: Lane
    running: int
    waiting: int
    oldest_wait_s: float


@dataclass(frozen=True, slots=True)
class LatencyHistogram:
    """`counts[i]` latencies since the scheduler started were at most `bounds[i]` seconds and above the bound before; the last count
    is of those above all bounds. Both are empty from a server that does not tell."""

    bounds: tuple[float, ...] = ()
    counts: tuple[int, ...] = ()
    sum: float = 0.0


@dataclass(frozen=True, slots=True)
class LaneShares:
    """Slots that each lane is guaranteed while it has work, in per cent."""

    real_time: int
    standard: int
    batch: int


@dataclass(frozen=True, slots=True)
class Policy:
    """Who runs sooner. `reason` says by whom and why it was set, empty when it is what the settings say or was just set."""

    policy: str
    fair_share: bool
    lane_shares: LaneShares
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Load:
    """Meanings as in `tokenmill.admin.v1.GetLoadResponse`."""

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
    queue_paused: bool
    prefix_cache_queries: int
    prefix_cache_hits: int
    queue_pause_reason: str
    lanes: tuple[LaneLoad, ...]
    time_to_first_token: LatencyHistogram
    inter_token_latency: LatencyHistogram
    request_queue_time: LatencyHistogram
    batch_occupancy_sum: float
    wait_reasons: Mapping[str, int]
    streams_open: int
    finished: Mapping[str, int]
    overload_stage: int
    overload_reason: str
    recomputed_tokens: int
    overload_changes: int
    queued_tokens: int
