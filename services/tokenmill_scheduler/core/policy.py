"""Who runs sooner within a lane, or within one tenant's part of it: small pure strategies, composed in `ordering.py`.

One order serves both ends: admissions go from its front, victims are taken from its back. Must not know: lanes, tenants, plans.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Protocol

from tokenmill_scheduler.core.live import LiveRequest
from tokenmill_scheduler.core.request import State

# Compared as tuples; the last element, the ordinal, is unique.
Rank = tuple[float, ...]


class Policy(Protocol):
    name: str
    # Whether a waiting request may take the slot or the blocks of a running one that it `outranks`.
    displaces: bool
    # Whether a predicted prefix hit counts for more than the order of arrival (see `lineup.py`).
    prefers_hits: bool
    # Whether later requests can go before an earlier one without end, so that it has to age (see `ordering.py`).
    overtakes: bool

    def rank(self, live: LiveRequest) -> Rank:
        """Sorts queued and running requests, soonest first."""

    def outranks(self, live: LiveRequest, other: LiveRequest) -> bool:
        """Whether the difference between two requests is more than the order of arrival."""


def _resumes(live: LiveRequest) -> int:
    """0 sorts a preempted request before its equals: it has waited its turn once (C25)."""
    return 0 if live.state is State.PREEMPTED else 1


class Fcfs:
    """First come, first served."""

    name = "fcfs"
    displaces = False
    prefers_hits = False
    overtakes = False

    def rank(self, live: LiveRequest) -> Rank:
        return (_resumes(live), live.request.arrival_s, live.ordinal)

    def outranks(self, live: LiveRequest, other: LiveRequest) -> bool:
        return False


class Priority:
    """The higher priority first, ties by arrival; a request displaces one that runs and is of lower priority."""

    name = "priority"
    displaces = True
    prefers_hits = False
    overtakes = True

    def rank(self, live: LiveRequest) -> Rank:
        return (-live.request.priority, _resumes(live), live.request.arrival_s, live.ordinal)

    def outranks(self, live: LiveRequest, other: LiveRequest) -> bool:
        return live.request.priority > other.request.priority


class ShortestJobFirst(Fcfs):
    """The least predicted work first, ties by arrival. It preempts nobody: a long one that runs, runs on."""

    name = "sjf"
    overtakes = True

    def __init__(self, remaining: Callable[[LiveRequest], int]) -> None:
        """`remaining` predicts how many tokens a request will still make."""
        self._remaining = remaining

    def rank(self, live: LiveRequest) -> Rank:
        return (self._remaining(live), _resumes(live), live.request.arrival_s, live.ordinal)


class EarliestDeadlineFirst(Fcfs):
    """The earliest deadline first, those without one last; ties by arrival."""

    name = "edf"
    overtakes = True

    def rank(self, live: LiveRequest) -> Rank:
        deadline_s = live.request.deadline_s
        return (inf if deadline_s is None else deadline_s, _resumes(live), live.request.arrival_s, live.ordinal)


class LongestPrefixMatch(Fcfs):
    """The longest predicted prefix hit first, so that what is cached is used before it is evicted; ties by arrival."""

    name = "lpm"
    prefers_hits = True
    overtakes = True


POLICIES = (Fcfs.name, Priority.name, ShortestJobFirst.name, EarliestDeadlineFirst.name, LongestPrefixMatch.name)


def policy_named(name: str, remaining: Callable[[LiveRequest], int]) -> Policy:
    """`remaining` is what `sjf` goes by. Raises KeyError when there is no such policy."""
    known: tuple[Policy, ...] = (Fcfs(), Priority(), ShortestJobFirst(remaining), EarliestDeadlineFirst(), LongestPrefixMatch())
    return {policy.name: policy for policy in known}[name]
