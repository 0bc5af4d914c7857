"""What comes out of the core: frozen records of what it has decided, to be recorded, sent or told. What goes in is in `events.py`.

Times are Unix seconds. Must not know: how it is recorded or sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tokenmill_scheduler.core.events import Updated
from tokenmill_scheduler.core.plans import Plan, TokenLogprobs
from tokenmill_scheduler.core.request import FinishReason, State


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
    """To be sent. Needs no commit first: what it leads to is told to a client only after its own commit.

    `reaches_end`: it is of several steps, and the last of them is a sequence's last: the next plan goes on without that one.
    """

    executor: str
    plan: Plan
    reaches_end: bool = False


@dataclass(frozen=True, slots=True)
class OverloadChanged:
    """More or less work is held back from now on (see `overload.py`); `why` is empty when it is none. To be told, not recorded."""

    before: int
    after: int
    why: str
    at_s: float


Effect = Transitioned | TokensGenerated | Updated | PlanIssued | OverloadChanged
