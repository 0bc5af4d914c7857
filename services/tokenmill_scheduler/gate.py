"""Whether one more request may be queued, and when to come again if not: limits of the queue and of the tenant, and the overload.

All is decided before anything is stored. Must not know: protobuf, the ledger, the order in which requests run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tokenmill_scheduler.comeback import LEAST_S, Comebacks, delay_s
from tokenmill_scheduler.core.backlog import QueueLimits, most_tokens
from tokenmill_scheduler.core.overload import Stage
from tokenmill_scheduler.core.request import Lane, Request
from tokenmill_scheduler.desk import Overloaded, QueueFull, TenantLimit
from tokenmill_scheduler.loop import Loop
from tokenmill_scheduler.tenants import TenantLimits, Usage


@dataclass(frozen=True, slots=True)
class Arriving:
    """What is on its way to disk and will be queued."""

    requests: int = 0
    tokens: int = 0


class Gate:
    def __init__(self, loop: Loop, limits: QueueLimits, tenant_limits: Callable[[str], TenantLimits]) -> None:
        """`tenant_limits` gives those of a tenant as they are now."""
        self._loop = loop
        self._scheduler = loop.scheduler
        self._limits = limits
        self._tenant_limits = tenant_limits
        self._comebacks = Comebacks()

    def check(self, request: Request, arriving: Arriving) -> None:
        """Each choice counts as a request. Raises QueueFull, TenantLimit, Overloaded."""
        now_s = self._loop.clock()
        self._check_overload(request, now_s)
        self._check_queue(request, arriving, now_s)
        self._check_tenant(request, now_s)

    def _check_overload(self, request: Request, now_s: float) -> None:
        scheduler = self._scheduler
        if scheduler.overload_stage >= Stage.STANDARD_REFUSED and request.lane is Lane.STANDARD:
            words = f"the standard lane is refused for now: {scheduler.overload_why}"
            delay = self._come_again_s(request, now_s, least_s=scheduler.config.overload.recovery_s)
            raise Overloaded(words, delay, "overload_control")

    def _check_queue(self, request: Request, arriving: Arriving, now_s: float) -> None:
        choices, tokens = request.best_of, request.best_of * most_tokens(request)
        queued, most = self._scheduler.num_waiting + arriving.requests, self._limits.max_len
        if queued + choices > most:
            counts = "" if choices == 1 else f", and this one counts as {choices}"
            words = f"{queued} requests are queued, --max-queue-len allows {most}{counts}"
            raise QueueFull(words, self._come_again_s(request, now_s) if choices <= most else None, "max_queue_len")
        queued_tokens, most_queued = self._scheduler.num_queued_tokens + arriving.tokens, self._limits.max_tokens
        if most_queued is not None and tokens > most_queued:
            words = f"the request may come to {tokens} tokens, more than the {most_queued} that --max-queue-tokens allows in all"
            raise QueueFull(f"{words}: ask for a lower max_tokens", None, "max_queue_tokens")
        if most_queued is not None and queued_tokens + tokens > most_queued:
            words = f"queued requests may come to {queued_tokens} tokens, --max-queue-tokens allows {most_queued}"
            delay = self._come_again_s(request, now_s)
            raise QueueFull(f"{words}, and this one may come to {tokens}", delay, "max_queue_tokens")

    def _come_again_s(self, request: Request, now_s: float, least_s: float = LEAST_S) -> float:
        drain, tokens = self._scheduler.queue_drain, request.best_of * most_tokens(request)
        return self._comebacks.next_s(request.best_of, tokens, (drain.requests, drain.tokens), now_s, least_s)

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
