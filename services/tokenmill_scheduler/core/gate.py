"""Whether one more request may be queued, and when to come again if not: the limits of the queue, and the overload.

Asked before a request is an event, by the service's gate and by the simulator. Must not know: tenants' limits, wire formats.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenmill_scheduler.core.backlog import QueueLimits, most_tokens
from tokenmill_scheduler.core.comeback import LEAST_S, Comebacks
from tokenmill_scheduler.core.overload import Stage
from tokenmill_scheduler.core.request import Lane, Request
from tokenmill_scheduler.core.scheduler import Scheduler

OVERLOAD = "overload_control"
QUEUE_LEN = "max_queue_len"
QUEUE_TOKENS = "max_queue_tokens"


@dataclass(frozen=True, slots=True)
class Arriving:
    """What was let in and is not queued yet."""

    requests: int = 0
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Refusal:
    """`limit` is what it was refused for; `come_again_s` None: it will never be taken."""

    limit: str
    words: str
    come_again_s: float | None


class QueueGate:
    """Its only state is what it has promised to those that it refused."""

    def __init__(self, scheduler: Scheduler, limits: QueueLimits) -> None:
        self._scheduler = scheduler
        self._limits = limits
        self._comebacks = Comebacks()

    def refuses(self, request: Request, arriving: Arriving, now_s: float) -> Refusal | None:
        """Each choice counts as a request."""
        return (
            self._for_overload(request, now_s)
            or self._for_its_length(request, arriving, now_s)
            or self._for_its_tokens(request, arriving, now_s)
        )

    def _for_overload(self, request: Request, now_s: float) -> Refusal | None:
        scheduler = self._scheduler
        if scheduler.overload_stage < Stage.STANDARD_REFUSED or request.lane is not Lane.STANDARD:
            return None
        words = f"the standard lane is refused for now: {scheduler.overload_why}"
        return Refusal(OVERLOAD, words, self._come_again_s(request, now_s, scheduler.config.overload.recovery_s))

    def _for_its_length(self, request: Request, arriving: Arriving, now_s: float) -> Refusal | None:
        choices, queued, most = request.best_of, self._scheduler.num_waiting + arriving.requests, self._limits.max_len
        if queued + choices <= most:
            return None
        counts = "" if choices == 1 else f", and this one counts as {choices}"
        words = f"{queued} requests are queued, --max-queue-len allows {most}{counts}"
        return Refusal(QUEUE_LEN, words, self._come_again_s(request, now_s) if choices <= most else None)

    def _for_its_tokens(self, request: Request, arriving: Arriving, now_s: float) -> Refusal | None:
        tokens, most = request.best_of * most_tokens(request), self._limits.max_tokens
        queued = self._scheduler.num_queued_tokens + arriving.tokens
        if most is None or queued + tokens <= most:
            return None
        if tokens > most:
            words = f"the request may come to {tokens} tokens, more than the {most} that --max-queue-tokens allows in all"
            return Refusal(QUEUE_TOKENS, f"{words}: ask for a lower max_tokens", None)
        words = f"queued requests may come to {queued} tokens, --max-queue-tokens allows {most}, and this one may come to {tokens}"
        return Refusal(QUEUE_TOKENS, words, self._come_again_s(request, now_s))

    def _come_again_s(self, request: Request, now_s: float, least_s: float = LEAST_S) -> float:
        drain, tokens = self._scheduler.queue_drain, request.best_of * most_tokens(request)
        return self._comebacks.next_s(request.best_of, tokens, (drain.requests, drain.tokens), now_s, least_s)
