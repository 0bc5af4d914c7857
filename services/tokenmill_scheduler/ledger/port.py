"""What the scheduler asks of its ledger: records in, records out. Rows and SQL stay behind this port.

`tests/fakes` has an in-memory ledger with the same contract; tests/unit/ledger runs the contract against all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from tokenmill_scheduler.core.records import TokenLogprobs, TokensGenerated, Transitioned, Updated
from tokenmill_scheduler.core.request import FinishReason, Request, State


class LedgerError(Exception):
    """Base of what a ledger raises."""


class LedgerUnavailable(LedgerError):
    """The database cannot be reached or refuses writes for now; the same write may be tried again."""


class LedgerConflict(LedgerError):
    """A guard failed: the row is not in the state that the record says. A bug of ours or a lost lease; never tried again."""


class LedgerCorrupt(LedgerError):
    """Stored rows contradict each other."""


class SchemaMismatch(LedgerError):
    """The database has another schema than this release; the message says which and what to run."""


class LeaseLost(LedgerConflict):
    """A lease that the write was fenced by has been taken or given up."""


@dataclass(frozen=True, slots=True)
class Lease:
    """The right of `owner` to drive `executor`; `epoch` is its fencing number. A higher epoch fences out the lower."""

    executor: str
    owner: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Submission:
    """A request to be accepted. `payload_digest` tells an equal payload from another under the same client-given id."""

    request: Request
    payload_digest: bytes


class Outcome(StrEnum):
    WRITTEN = "written"
    # A Submission whose id exists already, with an equal or with another payload; nothing was written for it.
    JOINED = "joined"
    CONFLICT = "conflict"


Record = Submission | Transitioned | TokensGenerated | Updated


@dataclass(frozen=True, slots=True)
class StoredRequest:
    """A request as the ledger has it. `num_output_tokens` counts what is stored. Times are Unix seconds."""

    request: Request
    state: State
    num_output_tokens: int
    finish_reason: FinishReason | None = None
    error: str = ""
    error_code: int = 0
    executor: str = ""
    preemptions: int = 0
    first_token_s: float | None = None
    finished_s: float | None = None


@dataclass(frozen=True, slots=True)
class StoredOutput:
    """Output tokens from `first_index` on; `logprobs` is empty or has one entry a token."""

    first_index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class StoredTransition:
    before: State | None
    after: State
    at_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class RequestQuery:
    """All conditions hold together; an empty or None one holds always."""

    states: tuple[State, ...] = ()
    tenant: str = ""
    model: str = ""
    min_priority: int | None = None
    max_priority: int | None = None
    oldest_first: bool = False
    limit: int = 100
    page_token: str = ""


@dataclass(frozen=True, slots=True)
class RequestPage:
    """`next_page_token` is empty on the last page."""

    requests: tuple[StoredRequest, ...]
    next_page_token: str


class Ledger(Protocol):
    """Thread-safe; writes take turns. Every method may raise LedgerUnavailable.

    Tokens of a request must follow the last one stored and a move must leave the stored state: else LedgerConflict.
    """

    def write(self, records: Sequence[Record], leases: Sequence[Lease] = ()) -> list[Outcome]:
        """Writes all records in one transaction, durable on return, and answers for each.

        A Submission that exists already gives JOINED or CONFLICT and does not disturb the others.
        Raises LedgerUnavailable (the same call may be repeated, and never writes twice), LedgerConflict (nothing written), or
        LeaseLost when one of `leases` no longer holds (nothing written).
        """

    def unfinished(self) -> Iterator[tuple[StoredRequest, StoredOutput]]:
        """Every request in no terminal state, in order of arrival (ties: of acceptance), with its output so far."""

    def find(self, request_id: str) -> StoredRequest | None: ...

    def payload_digest(self, request_id: str) -> bytes | None: ...

    def output(self, request_id: str, first_index: int = 0) -> StoredOutput:
        """Empty when there is none from `first_index` on. Raises LedgerCorrupt when the stored chunks do not join."""

    def transitions(self, request_id: str) -> tuple[StoredTransition, ...]: ...

    def query(self, query: RequestQuery) -> RequestPage:
        """Newest arrivals first unless `oldest_first`. Raises ValueError when the page token is not one it gave."""

    def next_epoch(self, executor: str, at_least: int) -> int:
        """A number never given before for this executor and ≥ `at_least`, durable on return."""

    def prune(self, finished_before_s: float, limit: int) -> int:
        """Deletes up to `limit` requests that ended before then (Unix seconds), with their output; returns how many."""

    def close(self) -> None: ...
