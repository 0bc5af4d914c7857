"""Lanes: real-time before standard before batch, each with slots that it is guaranteed. Must not know: requests, queues, policies.

A guarantee is of slots, as each running sequence takes part in each step. A lane that has fewer running than it is guaranteed, and
work, is admitted before the others; what a lane does not use, the others may.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


def check_lane_shares(shares: Sequence[int]) -> None:
    """Raises ValueError, with what is to be done."""
    if len(shares) != len(Lane) or any(not 0 <= share <= 100 for share in shares) or sum(shares) > 100:
        raise ValueError(f"lane shares are whole numbers, and come to 100 per cent at most, not {lane_shares_in_words(shares)}")


def parse_lane_shares(text: str) -> LaneShares:
    """Of words such as "real_time=50,standard=40,batch=10"; a lane that is not named keeps its default. Raises ValueError."""
    lanes = {lane.name.lower(): lane for lane in Lane}
    shares = dict(zip(Lane, DEFAULT_LANE_SHARES, strict=True))
    for part in text.split(","):
        name, _, share = part.strip().partition("=")
        if name not in lanes or not (share.isascii() and share.isdigit()):
            raise ValueError(f"{text!r} is not like {lane_shares_in_words(DEFAULT_LANE_SHARES)}, in per cent of the slots")
        shares[lanes[name]] = int(share)
    check_lane_shares(tuple(shares.values()))
    return shares[Lane.REAL_TIME], shares[Lane.STANDARD], shares[Lane.BATCH]


def lane_shares_in_words(shares: Sequence[int]) -> str:
    return ",".join(f"{lane.name.lower()}={share}" for lane, share in zip(Lane, shares, strict=True))
