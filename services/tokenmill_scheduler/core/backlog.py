"""What waits, by lane and tenant: since when, how many tokens, and how fast it goes.

Must not know: the queues' order, why a request leaves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tokenmill_scheduler.core.alarms import Alarms
from tokenmill_scheduler.core.drain import Drain
from tokenmill_scheduler.core.live import LiveRequest
from tokenmill_scheduler.core.request import Lane, Request, State


def most_tokens(request: Request) -> int:
    """The most that a request can come to, prompt and output."""
    return len(request.prompt) + request.sampling.max_tokens


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Most requests, and most tokens of theirs (see `most_tokens`; None: no limit), that may wait."""

    max_len: int = 10_000
    max_tokens: int | None = None


class Backlog:
    """A request comes when it is queued and leaves when it is queued no more, of all models together."""

    def __init__(self) -> None:
        self.drain = Drain()
        self._tokens = dict.fromkeys(Lane, 0)
        # Of those that have never run, by tenant: one that was preempted has had its first token, or is about to have it again.
        self._arrivals: dict[Lane, dict[str, Alarms]] = {lane: {} for lane in Lane}

    def came(self, live: LiveRequest, now_s: float) -> None:
        request = live.request
        self._tokens[request.lane] += most_tokens(request)
        if live.state is State.WAITING:
            arrivals = self._arrivals[request.lane].setdefault(request.tenant, Alarms())
            # Not since its arrival, which may have been long before this scheduler took it over.
            arrivals.set(request.request_id, now_s, live.ordinal)

    def left(self, live: LiveRequest, now_s: float) -> None:
        """Before its state changes."""
        request, tokens = live.request, most_tokens(live.request)
        self._tokens[request.lane] -= tokens
        self.drain.left(tokens, now_s)
        if live.state is State.WAITING:
            arrivals = self._arrivals[request.lane][request.tenant]
            arrivals.discard(request.request_id)
            if not len(arrivals):
                # Names are many over the years.
                del self._arrivals[request.lane][request.tenant]

    def tokens(self, *lanes: Lane) -> int:
        """Of all queued requests of these lanes, prompts and the output they may make."""
        return sum(self._tokens[lane] for lane in lanes)

    def num_waiting(self, tenant: str) -> int:
        """Requests of a tenant that have never run."""
        return sum(len(arrivals[tenant]) for arrivals in self._arrivals.values() if tenant in arrivals)

    def longest_wait_s(self, lane: Lane, now_s: float, counts: Callable[[str], bool]) -> float | None:
        """How long the first request that has never run has been here, of tenants that count; None without one."""
        oldest_s = min(
            (
                earliest[0]
                for tenant, arrivals in self._arrivals[lane].items()
                if counts(tenant) and (earliest := arrivals.earliest())
            ),
            default=None,
        )
        return None if oldest_s is None else max(0.0, now_s - oldest_s)
