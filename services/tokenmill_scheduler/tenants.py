"""How much of the service each tenant has taken, and how much it may. Must not know: what a tenant is proved by.

Counted per scheduler, and only for requests that have not ended; every change is a step of constant time.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tokenmill_scheduler.core.backlog import most_tokens
from tokenmill_scheduler.core.drain import Rate
from tokenmill_scheduler.core.quotas import Quota
from tokenmill_scheduler.core.request import QUEUED, TERMINAL, Request, State

# What becomes of a request over its tenant's quota; the second refuses it.
OVER_QUOTA = ("wait", "refuse")


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """Most requests, queued and running, and most tokens of queued requests (prompt and max_tokens). None: no limit.

    What is beyond them is refused. `quota` is for what runs; `weight`, above 0, is what its fair share is in proportion to.
    """

    max_requests: int | None = None
    max_queued_tokens: int | None = None
    quota: Quota = field(default_factory=Quota)
    weight: float = 1.0


@dataclass(slots=True)
class Usage:
    """And how fast requests end, and tokens leave the queue."""

    requests: int = 0
    queued_tokens: int = 0
    ended: Rate = field(default_factory=Rate, compare=False)
    drained: Rate = field(default_factory=Rate, compare=False)


class TenantUsage:
    """A request comes once, moves, and leaves by its move into a terminal state or by `left`."""

    def __init__(self) -> None:
        self._by_tenant: dict[str, Usage] = {}

    def __len__(self) -> int:
        """Tenants that have something here."""
        return len(self._by_tenant)

    def of(self, tenant: str) -> Usage:
        return self._by_tenant.get(tenant) or Usage()

    def came(self, request: Request, state: State = State.WAITING) -> None:
        usage = self._by_tenant.setdefault(request.tenant, Usage())
        usage.requests += 1
        if state in QUEUED:
            usage.queued_tokens += most_tokens(request)

    def moved(self, request: Request, before: State, after: State, at_s: float) -> None:
        usage = self._by_tenant[request.tenant]
        if before in QUEUED and after not in QUEUED:
            usage.drained.add(most_tokens(request), at_s)
        if after in TERMINAL:
            usage.ended.add(1, at_s)
        self._count(request, before, after)

    def left(self, request: Request, state: State = State.WAITING) -> None:
        """It is another's to count from here on."""
        self._count(request, state, State.CANCELLED)

    def _count(self, request: Request, before: State, after: State) -> None:
        usage = self._by_tenant[request.tenant]
        usage.queued_tokens += most_tokens(request) * ((after in QUEUED) - (before in QUEUED))
        if after in TERMINAL:
            usage.requests -= 1
            if usage.requests == 0:
                # Names are many over the years; those with nothing here are not kept.
                del self._by_tenant[request.tenant]
