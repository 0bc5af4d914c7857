"""How much of the service each tenant has taken, and how much it may. Must not know: what a tenant is proved by.

Counted per scheduler, and only for requests that have not ended; every change is a step of constant time.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenmill_scheduler.core.request import QUEUED, TERMINAL, Request, State


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """Most requests, queued and running, and most tokens of queued requests (prompt and max_tokens). None: no limit."""

    max_requests: int | None = None
    max_queued_tokens: int | None = None


@dataclass(slots=True)
class Usage:
    requests: int = 0
    queued_tokens: int = 0


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
            usage.queued_tokens += num_tokens(request)

    def moved(self, request: Request, before: State, after: State) -> None:
        usage = self._by_tenant[request.tenant]
        usage.queued_tokens += num_tokens(request) * ((after in QUEUED) - (before in QUEUED))
        if after in TERMINAL:
            usage.requests -= 1
            if usage.requests == 0:
                # Names are many over the years; those with nothing here are not kept.
                del self._by_tenant[request.tenant]

    def left(self, request: Request, state: State = State.WAITING) -> None:
        """It is another's to count from here on."""
        self.moved(request, state, State.CANCELLED)


def num_tokens(request: Request) -> int:
    """The most that it can come to."""
    return len(request.prompt) + request.sampling.max_tokens
