"""Who runs sooner: small pure strategies. Must not know: executors, blocks, plans.

One order serves both ends: admissions go from its front, victims are taken from its back.
"""

from __future__ import annotations

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

    def rank(self, live: LiveRequest) -> Rank:
        """Sorts queued and running requests, soonest first."""

    def outranks(self, live: LiveRequest, other: LiveRequest) -> bool:
        """Whether the difference between two requests is more than the order of arrival."""


def _resumes(live: LiveRequest) -> int:
    """0 sorts a preempted request before its equals: it has waited its turn once (C25)."""
    return 0 if live.state is State.PREEMPTED else 1


class Fcfs:
    """First come, first served; lanes and priorities are ignored."""

    name = "fcfs"
    displaces = False
    prefers_hits = False

    def rank(self, live: LiveRequest) -> Rank:
        return (_resumes(live), live.request.arrival_s, live.ordinal)

    def outranks(self, live: LiveRequest, other: LiveRequest) -> bool:
        return False


class Priority:
    """By lane, then by priority, ties by arrival; a request displaces one that runs and is behind it in lane or priority."""

    name = "priority"
    displaces = True
    prefers_hits = False

    def rank(self, live: LiveRequest) -> Rank:
        return (live.request.lane, -live.request.priority, _resumes(live), live.request.arrival_s, live.ordinal)

    def outranks(self, live: LiveRequest, other: LiveRequest) -> bool:
        ours, theirs = live.request, other.request
        return (ours.lane, -ours.priority) < (theirs.lane, -theirs.priority)


class LongestPrefixMatch(Fcfs):
    """The longest predicted prefix hit first, so that what is cached is used before it is evicted; ties by arrival."""

    name = "lpm"
    prefers_hits = True


POLICIES: dict[str, type[Fcfs] | type[Priority]] = {policy.name: policy for policy in (Fcfs, Priority, LongestPrefixMatch)}
