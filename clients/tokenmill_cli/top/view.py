"""What an operator has chosen to see, and what each key changes of it. Pure; must not know: terminals, how it is drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeVar

from tokenmill_client.records import Lane, RequestInfo

T = TypeVar("T")

LEAST_S, MOST_S = 0.1, 60.0
# In the order in which they are told.
KEYS = {
    "q": "quit",
    "p": "pause and go on",
    "s": "sort the requests: by age, tokens, priority",
    "l": "requests of one lane, or of all",
    "+": "look twice as often",
    "-": "look half as often",
    "?": "this help",
}


class Order(StrEnum):
    """Of the requests that are shown, what comes first: the oldest, those of most tokens, those of the highest priority."""

    AGE = "age"
    TOKENS = "tokens"
    PRIORITY = "priority"


@dataclass(frozen=True, slots=True)
class View:
    """`lane` None: all. `paused`: it stays as it is until it is to go on."""

    interval_s: float = 1.0
    order: Order = Order.AGE
    lane: Lane | None = None
    paused: bool = False
    help: bool = False
    quits: bool = False

    def pressed(self, key: str) -> View:
        """After a key, in upper or lower case; one that means nothing changes nothing, but ends the help."""
        change = _CHANGES.get(key.lower(), _unchanged)
        return change(replace(self, help=self.help and key == "?"))

    def chosen(self, requests: Iterable[RequestInfo]) -> list[RequestInfo]:
        """Those of its lane in its order; of equal rank as they come, the oldest first."""
        return sorted([info for info in requests if self.lane in (None, info.lane)], key=_RANKS[self.order])


def _unchanged(view: View) -> View:
    return view


def _next(members: Sequence[T], member: T) -> T:
    return members[(members.index(member) + 1) % len(members)]


_LANES: tuple[Lane | None, ...] = (None, *Lane)
_RANKS: dict[Order, Callable[[RequestInfo], float]] = {
    Order.AGE: lambda info: info.submitted_at.timestamp() if info.submitted_at else 0.0,
    Order.TOKENS: lambda info: -(info.usage.prompt_tokens + info.usage.output_tokens),
    Order.PRIORITY: lambda info: -info.priority,
}
_CHANGES: dict[str, Callable[[View], View]] = {
    "q": lambda view: replace(view, quits=True),
    "p": lambda view: replace(view, paused=not view.paused),
    "s": lambda view: replace(view, order=_next(tuple(Order), view.order)),
    "l": lambda view: replace(view, lane=_next(_LANES, view.lane)),
    "+": lambda view: replace(view, interval_s=max(view.interval_s / 2, LEAST_S)),
    "-": lambda view: replace(view, interval_s=min(view.interval_s * 2, MOST_S)),
    "?": lambda view: replace(view, help=not view.help),
}
