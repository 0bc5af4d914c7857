"""Whether one more request may be accepted, and when to come again if not: the core's gate, then the limits of its tenant.

All is decided before anything is stored. Must not know: protobuf, the ledger, the order in which requests run.
"""

from __future__ import annotations

from collections.abc import Callable

from tokenmill_scheduler.core.backlog import QueueLimits, most_tokens
from tokenmill_scheduler.core.comeback import delay_s
from tokenmill_scheduler.core.gate import OVERLOAD, Arriving, QueueGate
from tokenmill_scheduler.core.request import Request
from tokenmill_scheduler.desk.errors import Overloaded, QueueFull, TenantLimit
from tokenmill_scheduler.loop import Loop
from tokenmill_scheduler.tenants import TenantLimits, Usage


class Gate:
    def __init__(self, loop: Loop, limits: QueueLimits, tenant_limits: Callable[[str], TenantLimits]) -> None:
        """`tenant_limits` gives those of a tenant as they are now."""
        self._loop = loop
        self._scheduler = loop.scheduler
        self._queue = QueueGate(loop.scheduler, limits)
        self._tenant_limits = tenant_limits

    def check(self, request: Request, arriving: Arriving) -> None:
        """Each choice counts as a request. Raises QueueFull, TenantLimit, Overloaded."""
        now_s = self._loop.clock()
        refusal = self._queue.refuses(request, arriving, now_s)
        if refusal is not None:
            error = Overloaded if refusal.limit == OVERLOAD else QueueFull
            raise error(refusal.words, refusal.come_again_s, refusal.limit)
        self._check_tenant(request, now_s)

    def _check_tenant(self, request: Request, now_s: float) -> None:
        limits, usage = self._tenant_limits(request.tenant), self._loop.live.tenants.of(request.tenant)
        self._check_tenant_requests(request, limits, usage, now_s)
        self._check_tenant_tokens(request, limits, usage, now_s)
        if never := self._scheduler.never_within_quota(request):
            raise TenantLimit(never, None, "quota")
        if limits.quota.refuses and (over := self._scheduler.over_quota(request, now_s)):
            ready_s = self._scheduler.tokens_ready_s(request.tenant, now_s) - now_s
            raise TenantLimit(over, ready_s if 0 < ready_s < float("inf") else _ends_s(usage, 1, now_s), "quota")

    def _check_tenant_requests(self, request: Request, limits: TenantLimits, usage: Usage, now_s: float) -> None:
        most, choices = limits.max_requests, request.best_of
        if most is not None and usage.requests + choices > most:
            words = f"tenant {request.tenant} has {usage.requests} requests and may have {most}; this one counts as {choices}"
            raise TenantLimit(words, _ends_s(usage, choices, now_s) if choices <= most else None, "max_requests")

    def _check_tenant_tokens(self, request: Request, limits: TenantLimits, usage: Usage, now_s: float) -> None:
        tenant, most, tokens = request.tenant, limits.max_queued_tokens, request.best_of * most_tokens(request)
        if most is not None and tokens > most:
            words = f"the request may come to {tokens} tokens, more than the {most} that tenant {tenant} may have queued"
            raise TenantLimit(f"{words}: ask for a lower max_tokens", None, "max_queued_tokens")
        if most is not None and usage.queued_tokens + tokens > most:
            words = f"tenant {tenant} has {usage.queued_tokens} tokens queued and may have {most}; the request may come to {tokens}"
            delay = delay_s(usage.queued_tokens + tokens - most, usage.drained.per_s(now_s))
            raise TenantLimit(words, delay, "max_queued_tokens")


def _ends_s(usage: Usage, requests: int, now_s: float) -> float:
    """When so many of the tenant's requests will probably have ended."""
    return delay_s(requests, usage.ended.per_s(now_s))
