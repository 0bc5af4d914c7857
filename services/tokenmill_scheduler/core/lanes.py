"""Lanes: real-time before standard before batch, each with slots that it is guaranteed. Must not know: requests, queues, policies.

A guarantee is of slots, as each running sequence takes part in each step. A lane that has fewer running than it is guaranteed, and
work, is admitted before the others; what a lane does not use, the others may.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from tokenmill_scheduler.core.request import Lane

# Per cent of an executor's slots, in the order of `Lane`.
LaneShares = tuple[int, int, int]
DEFAULT_LANE_SHARES: LaneShares = (50, 40, 10)


@lru_cache(maxsize=64)
def guaranteed_slots(shares: LaneShares, slots: int) -> Mapping[Lane, int]:
    """Of `slots`, each lane's share rounded down, and one at the least where there are enough; 0 for a share of 0.

    A lane that got its one slot by that takes it from the largest, so the sum is at most `slots`.
    """
    guaranteed = {lane: share * slots // 100 for lane, share in zip(Lane, shares, strict=True)}
    entitled = [lane for lane, share in zip(Lane, shares, strict=True) if share]
    if slots < len(entitled):
        return dict.fromkeys(Lane, 0)
    for lane in entitled:
        guaranteed[lane] = max(1, guaranteed[lane])
    while sum(guaranteed.values()) > slots:
        guaranteed[max(Lane, key=lambda lane: guaranteed[lane])] -= 1
    return guaranteed
