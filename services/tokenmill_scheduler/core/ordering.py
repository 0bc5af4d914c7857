"""The whole order: lanes, then tenants where they share fairly, then the policy within. Records and questions; no state.

Ageing: every `ageing_turn`-th admission of a line (one tenant's requests in one lane, or all of a lane) goes to the one in it that
arrived first, so a request with n older ones in its line runs within (n + 1) × ageing_turn admissions. `priority` is strict until a
request has waited `max_priority_wait_s`. One that ran by its age is placed first from then on, lest it be given up at once. A lane
of which nothing runs is passed over `ageing_turn` times at most. Must not know: queues, executors, blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tokenmill_scheduler.core.lanes import DEFAULT_LANE_SHARES, LaneShares
from tokenmill_scheduler.core.live import LiveRequest
from tokenmill_scheduler.core.policy import Policy, Rank

AGEING_TURN = 16
MAX_PRIORITY_WAIT_S = 300.0


@dataclass(frozen=True, slots=True)
class Ordering:
    """`remaining` predicts how many tokens a request will still make. `weights` has the tenants that differ from 1.

    `ageing_turn` 0 and `max_priority_wait_s` infinite: never.
    """

    policy: Policy
    remaining: Callable[[LiveRequest], int]
    lane_shares: LaneShares = DEFAULT_LANE_SHARES
    fair_share: bool = False
    weights: Mapping[str, float] = field(default_factory=dict)
    ageing_turn: int = AGEING_TURN
    max_priority_wait_s: float = MAX_PRIORITY_WAIT_S

    def line(self, live: LiveRequest) -> str:
        """The line of its lane that a request waits in: that of its tenant, or the only one."""
        return live.request.tenant if self.fair_share else ""

    def weight(self, tenant: str) -> float:
        return self.weights.get(tenant, 1.0)

    def rank(self, live: LiveRequest) -> Rank:
        """Within a line."""
        return (not live.aged, *self.policy.rank(live))

    def outranks(self, live: LiveRequest, other: LiveRequest) -> bool:
        """Whether `other` may not pass it, even if it does not fit: for its lane, or by the policy of the line they share."""
        if live.request.lane is not other.request.lane:
            return live.request.lane < other.request.lane
        return self.line(live) == self.line(other) and self.policy.outranks(live, other)

    def displaces(self, live: LiveRequest, other: LiveRequest) -> bool:
        """Whether it may take what `other` runs on, but for the guarantee of that one's lane.

        Tenants that share fairly do so by admissions: there priorities order the requests of each, and displace nobody.
        """
        if live.request.lane is not other.request.lane:
            return live.request.lane < other.request.lane
        return not self.fair_share and not other.aged and self.policy.outranks(live, other)

    def ages(self, live: LiveRequest, turn: int, now_s: float) -> bool:
        """Whether the oldest of a line goes next, `turn` others having been admitted since the last time it did."""
        if not self.policy.overtakes or not 0 < self.ageing_turn <= turn + 1:
            return False
        return not self.policy.displaces or now_s - live.request.arrival_s >= self.max_priority_wait_s

    def cost(self, live: LiveRequest) -> int:
        """Tokens its tenant is charged when it is admitted: all it will probably come to, less what was paid for before."""
        return sum(choice.known + self.remaining(choice) - choice.paid for choice in live.gang or (live,))
