"""What a request is, and the one table of its legal moves between states.

Must not know: executors, plans, protobuf, SQL, clocks. The diagram in docs/request-states.md is generated from `TRANSITIONS`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum, StrEnum


class State(StrEnum):
    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    PREEMPTED = "preempted"
    DONE = "done"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    FAILED = "failed"


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    ERROR = "error"


class Lane(IntEnum):
    """Quality of service, in the order in which the priority policy runs them."""

    REAL_TIME = 1
    STANDARD = 2
    BATCH = 3


_ENDINGS = frozenset({State.DONE, State.CANCELLED, State.EXPIRED, State.FAILED})

TRANSITIONS: dict[State, frozenset[State]] = {
    State.WAITING: frozenset({State.PREFILL, State.CANCELLED, State.EXPIRED, State.FAILED}),
    State.PREFILL: frozenset({State.DECODE, State.PREEMPTED}) | _ENDINGS,
    State.DECODE: frozenset({State.PREEMPTED}) | _ENDINGS,
    # DONE from PREEMPTED: the token of a plan that was in flight when its blocks were given up can be its last.
    State.PREEMPTED: frozenset({State.PREFILL}) | _ENDINGS,
    State.DONE: frozenset(),
    State.CANCELLED: frozenset(),
    State.EXPIRED: frozenset(),
    State.FAILED: frozenset(),
}

TERMINAL = frozenset(state for state, after in TRANSITIONS.items() if not after)
RUNNING = frozenset({State.PREFILL, State.DECODE})
QUEUED = frozenset({State.WAITING, State.PREEMPTED})


class IllegalTransition(Exception):
    """A move that `TRANSITIONS` does not have; nothing was changed."""


def check_transition(before: State, after: State) -> None:
    """Raises IllegalTransition unless a request may move from `before` to `after`."""
    if after not in TRANSITIONS[before]:
        raise IllegalTransition(f"{before} → {after}")


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen: validated, defaults filled in. Meanings as in `tokenmill.inference.v1.SamplingParams`."""

    max_tokens: int
    seed: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """What a client asked for, immutable but for priority and deadline, which an Updated event replaces.

    Times are Unix seconds. `queue_deadline_s` ends it if it has not run by then. `retry_of` names the FAILED request that this one
    is a second try of. `stop` and `include_stop` are carried for the text layer; the core does not read them.

    Of a request for several choices each is a request (see `choices.py`): `n` of them are given out, the best of the `best_of` that
    run. `choice` counts them from 0, and all but the first name that one as their `parent`. `logprobs_hidden`: log probabilities
    are kept to tell which are best, and not shown.
    """

    request_id: str
    model: str
    prompt: tuple[int, ...]
    sampling: Sampling
    arrival_s: float
    priority: int = 0
    deadline_s: float | None = None
    tenant: str = "default"
    detached: bool = False
    cache_salt: str = ""
    stop: tuple[str, ...] = field(default=())
    include_stop: bool = False
    lane: Lane = Lane.STANDARD
    queue_deadline_s: float | None = None
    retry_of: str = ""
    parent: str = ""
    choice: int = 0
    n: int = 1
    best_of: int = 1
    logprobs_hidden: bool = False

    @property
    def group_id(self) -> str:
        """The id of the whole that this is a choice of: its own, unless it is a further one."""
        return self.parent or self.request_id
