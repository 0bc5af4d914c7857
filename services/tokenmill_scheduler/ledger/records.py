"""What is written to the ledger and read back: frozen records. Must not know: rows, SQL, who asks.

What the core decided is written as it comes: see `core/effects.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from tokenmill_scheduler.core.choices import further_choices
from tokenmill_scheduler.core.effects import TokensGenerated, Transitioned
from tokenmill_scheduler.core.events import Updated
from tokenmill_scheduler.core.plans import TokenLogprobs
from tokenmill_scheduler.core.request import FinishReason, Lane, Request, State


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
