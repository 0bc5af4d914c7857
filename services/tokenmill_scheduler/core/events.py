"""What goes into the core: frozen records of what has happened, none with behaviour. What comes out is in `effects.py`.

Times are Unix seconds, passed in beside the event. Must not know: who tells them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tokenmill_scheduler.core.plans import Blocks, ExecutorDescription, Result
from tokenmill_scheduler.core.quotas import Quota
from tokenmill_scheduler.core.request import Request, State


@dataclass(frozen=True, slots=True)
class Submitted:
    """A durable request. `output` is not empty, or `state` not WAITING, when it is taken up again after a restart.

    `choices` are further choices of the same request that wait as it does: all are admitted together. `losses`: so many executors
    it is suspected to have cost another scheduler that has given it away. `executor`: where it ran before the restart.
    """

    request: Request
    output: tuple[int, ...] = ()
    state: State = State.WAITING
    choices: tuple[Request, ...] = ()
    losses: int = 0
    executor: str = ""


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
