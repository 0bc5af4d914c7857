"""What is done to the service, drawn from a seed: which fault, when, for how long. Pure: no processes, no clock."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Target(StrEnum):
    SCHEDULER = "scheduler"
    EXECUTOR = "executor"
    DATABASE = "database"
    CLIENT = "client"
    CLIENT_LINK = "client–scheduler"
    EXECUTOR_LINK = "scheduler–executor"
    DATABASE_LINK = "scheduler–database"


class Action(StrEnum):
    # Of processes: SIGKILL and SIGTERM, later started again; SIGSTOP, later SIGCONT; a write lock that another process holds.
    KILLED = "killed"
    TOLD_TO_END = "told to end"
    STOPPED = "stopped"
    LOCKED = "locked"
    # Of connections: reset; nothing passes for a while; every chunk is late.
    RESET = "reset"
    CUT_OFF = "cut off"
    SLOWED = "slowed"


# The least and most seconds that one lasts. Stops and cuts are now shorter, now longer than the heartbeat timeout.
_LASTS_S = {
    Action.KILLED: (0.0, 1.5),
    Action.TOLD_TO_END: (0.0, 1.5),
    Action.STOPPED: (0.2, 4.0),
    Action.LOCKED: (0.2, 7.0),
    Action.RESET: (0.0, 0.0),
    Action.CUT_OFF: (0.2, 4.0),
    Action.SLOWED: (0.5, 3.0),
}

Kind = tuple[Target, Action]

_ANYWHERE: tuple[Kind, ...] = (
    (Target.SCHEDULER, Action.KILLED),
    (Target.SCHEDULER, Action.TOLD_TO_END),
    (Target.SCHEDULER, Action.STOPPED),
    (Target.EXECUTOR, Action.KILLED),
    (Target.EXECUTOR, Action.TOLD_TO_END),
    (Target.EXECUTOR, Action.STOPPED),
    (Target.CLIENT, Action.KILLED),
    *((link, action) for link in (Target.CLIENT_LINK, Target.EXECUTOR_LINK) for action in (Action.RESET, Action.CUT_OFF)),
    (Target.CLIENT_LINK, Action.SLOWED),
    (Target.EXECUTOR_LINK, Action.SLOWED),
)

KINDS: dict[str, tuple[Kind, ...]] = {
    "sqlite": (*_ANYWHERE, (Target.DATABASE, Action.LOCKED)),
    "postgresql": (
        *_ANYWHERE,
        (Target.DATABASE, Action.KILLED),
        (Target.DATABASE, Action.STOPPED),
        (Target.DATABASE_LINK, Action.RESET),
        (Target.DATABASE_LINK, Action.CUT_OFF),
    ),
}


@dataclass(frozen=True, slots=True)
class Fault:
    """`at_s` after the start; `which` of the targets of this kind is number `which` modulo their number."""

    target: Target
    action: Action
    at_s: float
    lasts_s: float
    which: int

    @property
    def kind(self) -> Kind:
        return self.target, self.action

    @property
    def kills_client(self) -> bool:
        return self.target is Target.CLIENT


def draw(rng: random.Random, kinds: Sequence[Kind], for_s: float, mean_gap_s: float) -> list[Fault]:
    """Faults at random moments of `for_s` seconds; they may overlap. Every kind comes once before any comes twice."""
    faults = []
    at_s = rng.expovariate(1 / mean_gap_s)
    for target, action in _decks(rng, kinds):
        if at_s >= for_s:
            break
        faults.append(Fault(target, action, at_s, rng.uniform(*_LASTS_S[action]), rng.randrange(1 << 16)))
        at_s += rng.expovariate(1 / mean_gap_s)
    return faults


def _decks(rng: random.Random, kinds: Sequence[Kind]) -> Iterator[Kind]:
    while True:
        yield from rng.sample(kinds, len(kinds))
