"""The order that is chosen, by the settings or while running, and how the record of it is written. Pure. Must not know: the loop,
the ledger, how the order is kept.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tokenmill_scheduler.core.events import PolicyChanged
from tokenmill_scheduler.core.lanes import LaneShares, check_lane_shares, lane_shares_in_words, parse_lane_shares
from tokenmill_scheduler.core.ordering import Ordering
from tokenmill_scheduler.core.policy import POLICIES

_RECORD = re.compile(r"policy=(?P<policy>\S+) fair_share=(?P<fair_share>on|off) lane_shares=(?P<lane_shares>\S+)")


@dataclass(frozen=True, slots=True)
class OrderingChoice:
    """`lane_shares` are per cent of the slots, in the order of `Lane`."""

    policy: str
    fair_share: bool
    lane_shares: LaneShares

    @classmethod
    def of(cls, ordering: Ordering) -> OrderingChoice:
        return cls(ordering.policy.name, ordering.fair_share, ordering.lane_shares)

    @classmethod
    def parse(cls, text: str) -> OrderingChoice:
        """Of what `str` made, perhaps by another version. Raises ValueError."""
        found = _RECORD.fullmatch(text)
        if found is None:
            raise ValueError(f"{text!r} is no record of a policy")
        choice = cls(found["policy"], found["fair_share"] == "on", parse_lane_shares(found["lane_shares"]))
        choice.check()
        return choice

    def check(self) -> None:
        """Raises ValueError, with what is to be done."""
        if self.policy not in POLICIES:
            raise ValueError(f"there is no policy {self.policy!r}: choose one of {', '.join(POLICIES)}")
        check_lane_shares(self.lane_shares)

    def __str__(self) -> str:
        fair_share = "on" if self.fair_share else "off"
        return f"policy={self.policy} fair_share={fair_share} lane_shares={lane_shares_in_words(self.lane_shares)}"

    @property
    def event(self) -> PolicyChanged:
        return PolicyChanged(self.policy, self.fair_share, self.lane_shares)
