"""What the scheduler asks of its ledger: records in, records out. Rows and SQL stay behind this port.

`tests/fakes` has an in-memory ledger with the same contract; tests/unit/ledger runs the contract against all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from tokenmill_scheduler.core.choices import further_choices
from tokenmill_scheduler.core.effects import TokensGenerated, Transitioned
from tokenmill_scheduler.core.events import KnownExecutor, Updated
from tokenmill_scheduler.core.plans import ExecutorDescription, TokenLogprobs
from tokenmill_scheduler.core.request import FinishReason, Lane, Request, State


class LedgerError(Exception):
    """Base of what a ledger raises."""


class LedgerUnavailable(LedgerError):
    """The database cannot be reached or refuses writes for now; the same write may be tried again."""


class LedgerConflict(LedgerError):
    """A guard failed: the row is not in the state that the record says, or may not move so. A bug of ours or a lost lease; never
    tried again.
    """


class LedgerCorrupt(LedgerError):
    """Stored rows contradict each other."""


class SchemaMismatch(LedgerError):
    """The database has another schema than this release; the message says which and what to run."""


class LeaseLost(LedgerConflict):
    """The lease that the write was fenced by has been taken or given up."""


class ExecutorTaken(LedgerError):
    """Another scheduler on this database drives the executor."""


class EpochsUsedUp(LedgerError):
    """An executor of this name has had MAX_EPOCH."""

    def __init__(self, executor: str) -> None:
        super().__init__(f"executor {executor} has had the highest epoch there is: give it another --name")


@dataclass(frozen=True, slots=True)
class Lease:
    """The right of one scheduler process to write; `number`, never given twice, is its fencing number."""

    number: int
    scheduler: str


@dataclass(frozen=True, slots=True)
class LeaseStatus:
    """A lease that nobody has taken over. `expired` by the database's clock; `given_up` by its own scheduler, which has stopped."""

    lease: Lease
    expired: bool
    given_up: bool


class Verb(StrEnum):
    CANCEL = "cancel"
    UPDATE = "update"
    # A client reads the request through another scheduler, or has left there.
    READ = "read"
    LEAVE = "leave"
    # The request is its own from now on.
    TAKE = "take"


@dataclass(frozen=True, slots=True)
class Command:
    """What one scheduler asks the one that has the request, whose lease is `lease`, to do with it. None leaves a value as it is.

    `actor` and `detail` are those of the Action to be recorded with it, when an operator asks. `losses` goes with TAKE: so many
    executors the request is suspected to have cost.
    """

    lease: int
    request_id: str
    verb: Verb
    reason: str = ""
    priority: int | None = None
    deadline_s: float | None = None
    actor: str = ""
    detail: str = ""
    losses: int = 0


@dataclass(frozen=True, slots=True)
class Submission:
    """A request to be accepted, with all its choices or not at all.

    `payload_digest` tells an equal payload from another under the same client-given id; it is kept with the first choice alone.
    """

    request: Request
    payload_digest: bytes

    @property
    def requests(self) -> tuple[Request, ...]:
        """All choices, in order."""
        return (self.request, *further_choices(self.request))


class Outcome(StrEnum):
    WRITTEN = "written"
    # A Submission whose id exists already, with an equal or with another payload, or a Handover to nobody: nothing was written.
    JOINED = "joined"
    CONFLICT = "conflict"


# The target of what is done to the policy.
POLICY = "*policy*"


class ActionVerb(StrEnum):
    CANCEL = "cancel"
    UPDATE = "update"
    RETRY = "retry"
    PAUSE_QUEUE = "pause_queue"
    RESUME_QUEUE = "resume_queue"
    DRAIN_EXECUTOR = "drain_executor"
    UNDRAIN_EXECUTOR = "undrain_executor"
    SET_POLICY = "set_policy"
    RESET_POLICY = "reset_policy"


@dataclass(frozen=True, slots=True)
class Action:
    """What an operator did, recorded with what it changed. `target` is a request id or an executor's name; empty: the queue.

    A pause or a drain puts its target on hold, a resume or an undrain ends the hold; a policy that is set is a hold, too, until it
    is reset.
    """

    at_s: float
    actor: str
    verb: ActionVerb
    target: str = ""
    reason: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Handover:
    """These requests, which wait, become those of the scheduler that drives this executor, and it is told so by a command.

    `losses`, one a request, as in Command.
    Where no other scheduler does, nothing is written: CONFLICT.
    """

    executor: str
    request_ids: tuple[str, ...]
    losses: tuple[int, ...]


Record = Submission | Transitioned | TokensGenerated | Updated | Action | Handover


@dataclass(frozen=True, slots=True)
class StoredRequest:
    """A request as the ledger has it. `num_output_tokens` counts what is stored. Times are Unix seconds.

    `lease` is that of the scheduler that has it; `scheduler` is that one's name, empty once the lease has been taken over.
    """

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
    lease: int | None = None
    scheduler: str = ""
    cached_tokens: int = 0


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
class Estate:
    """What fallen schedulers have left to the one that took over: unfinished requests in order of arrival, each with its output,
    and executors, as (name, address) pairs.
    """

    requests: tuple[tuple[StoredRequest, StoredOutput], ...] = ()
    executors: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class RequestQuery:
    """All conditions hold together; an empty or None one holds always. `arrived_before_s` is in Unix seconds.

    The order is by arrival, newest first unless `oldest_first`; `by_priority`, by priority first, the highest first.
    """

    states: tuple[State, ...] = ()
    tenant: str = ""
    model: str = ""
    lanes: tuple[Lane, ...] = ()
    min_priority: int | None = None
    max_priority: int | None = None
    arrived_before_s: float | None = None
    oldest_first: bool = False
    by_priority: bool = False
    limit: int = 100
    page_token: str = ""


@dataclass(frozen=True, slots=True)
class Hold:
    """An executor that is drained (`target` is its name), the queue that is paused (empty), or the policy that was set (POLICY).

    Until an operator ends it. `detail` is that of the action.
    """

    target: str
    actor: str
    reason: str
    at_s: float
    detail: str = ""


@dataclass(frozen=True, slots=True)
class ActionQuery:
    """An empty `target` means all."""

    target: str = ""
    limit: int = 100
    page_token: str = ""


@dataclass(frozen=True, slots=True)
class ActionPage:
    """Newest first. `next_page_token` is empty on the last page."""

    actions: tuple[Action, ...]
    next_page_token: str


@dataclass(frozen=True, slots=True)
class RequestPage:
    """`next_page_token` is empty on the last page."""

    requests: tuple[StoredRequest, ...]
    next_page_token: str


class Ledger(Protocol):
    """Thread-safe; writes take turns. Every method may raise LedgerUnavailable.

    Tokens of a request must follow the last one stored, and a move must leave the stored state and be in TRANSITIONS: else
    LedgerConflict.
    """

    def write(self, records: Sequence[Record], lease: Lease | None = None) -> list[Outcome]:
        """Writes all records in one transaction, durable on return, and answers for each.

        Requests that are submitted are those of `lease`, and it moves no other's: that gives LedgerConflict.
        A Submission that exists already gives JOINED or CONFLICT and does not disturb the others.
        Raises LedgerUnavailable (the same call may be repeated, and under a lease never writes twice), LedgerConflict (nothing
        written), or LeaseLost when `lease` no longer holds (nothing written).
        """

    def unfinished(self) -> Iterator[tuple[StoredRequest, StoredOutput]]:
        """Every request in no terminal state, in order of arrival (ties: of acceptance), with its output so far."""

    def find(self, request_id: str) -> StoredRequest | None: ...

    def payload_digest(self, request_id: str) -> bytes | None: ...

    def output(self, request_id: str, first_index: int = 0) -> StoredOutput:
        """Empty when there is none from `first_index` on. Raises LedgerCorrupt when the stored chunks do not join."""

    def transitions(self, request_id: str) -> tuple[StoredTransition, ...]: ...

    def query(self, query: RequestQuery) -> RequestPage:
        """Raises ValueError when the page token is not one it gave for this order."""

    def actions(self, query: ActionQuery) -> ActionPage:
        """Raises ValueError when the page token is not one it gave."""

    def holds(self) -> tuple[Hold, ...]:
        """All that are in force, by target."""

    def progress(self, counts: Mapping[str, int]) -> dict[str, tuple[StoredRequest, StoredOutput]]:
        """Of these requests, by id, those that have more tokens than counted here or have ended, with the output from there on."""

    # ---- leases: each may raise LeaseLost, with nothing done ----

    def take_lease(self, scheduler: str, lease_s: float) -> Lease: ...

    def renew_lease(self, lease: Lease, lease_s: float) -> None:
        """Runs out in `lease_s` from now. One that has run out and was not taken over is renewed."""

    def give_up_lease(self, lease: Lease) -> None:
        """Its scheduler writes no more: another may take over at once. Nothing happens if it was lost already."""

    def leases(self) -> tuple[LeaseStatus, ...]:
        """In order of their numbers."""

    def take_over(self, lease: Lease, fallen: Sequence[int], told: Sequence[str] = ()) -> Estate:
        """Ends these leases, whether or not they have run out, and makes what they held that of `lease`, durable on return.

        Requests that no lease ever held come along. Of the executors that a fallen scheduler of the same name was told of, the new
        one keeps those at the addresses that it is `told`; the others are left free. A lease that another has ended meanwhile is
        passed over.
        Raises LedgerConflict when it cannot tell whether it was carried out.
        """

    def held(self, lease: Lease, request_ids: Sequence[str]) -> tuple[tuple[StoredRequest, StoredOutput], ...]:
        """Of these requests those of `lease` that have not ended, in order of arrival, with their output so far."""

    def claim_executor(self, lease: Lease, executor: str, address: str, *, inherited: bool, at_least: int) -> int:
        """The executor is that of `lease` from here on. Returns its epoch: never given before for it and ≥ `at_least`. Raises
        EpochsUsedUp.

        `inherited` gives way to a scheduler that was told of the executor, and raises ExecutorTaken where one drives it;
        without, ExecutorTaken is raised where another does that has not merely inherited it.
        """

    def has_executor(self, lease: Lease, executor: str) -> bool: ...

    def tell_executors(self, lease: Lease, connected: Sequence[ExecutorDescription]) -> None:
        """Of the executors of this lease these are connected, and can hold so much. Those that are another's are passed over."""

    def known_executors(self, lease: Lease) -> tuple[KnownExecutor, ...]:
        """Those of all leases that were ever connected, by name; `elsewhere` are those that another has connected."""

    # ---- commands from one scheduler to another ----

    def send(self, commands: Sequence[Command]) -> tuple[int, ...]:
        """Their numbers."""

    def pending(self, numbers: Sequence[int]) -> frozenset[int]:
        """Which of them nobody has carried out or withdrawn, nor lost with the scheduler they were for."""

    def received(self, lease: Lease) -> tuple[tuple[int, Command], ...]:
        """What others ask of this scheduler, in order, each with its number."""

    def settle(self, numbers: Sequence[int]) -> None:
        """They are carried out, or withdrawn."""

    def prune(self, before_s: float, limit: int) -> int:
        """Deletes up to `limit` requests that ended before then (Unix seconds), with their output, and as many old actions.

        A request of several choices is deleted as a whole, once all of them have ended before then. Returns how many rows it were,
        each choice counted.
        """

    def close(self) -> None: ...
