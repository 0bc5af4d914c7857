"""What waits, by lane and tenant: since when, how many tokens, and how fast it goes.

Must not know: the queues' order, why a request leaves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

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


@dataclass(slots=True, eq=False)
class Part:
    """What one tenant has queued for one model in one lane. `arrivals` are of those that have never run: one that was preempted has
    had its first token, or is about to have it again."""

    tenant: str
    model: str
    tokens: int = 0
    arrivals: Alarms = field(default_factory=Alarms)

    @property
    def oldest_s(self) -> float | None:
        """Since when the first request that has never run has been here."""
        earliest = self.arrivals.earliest()
        return earliest[0] if earliest else None


class Backlog:
    """A request comes when it is queued and leaves when it is queued no more, of all models together."""

    def __init__(self) -> None:
        self.drain = Drain()
        self._tokens = dict.fromkeys(Lane, 0)
        # By lane, tenant and model; none that is empty, for names are many over the years.
        self._parts: dict[Lane, dict[str, dict[str, Part]]] = {lane: {} for lane in Lane}

    def came(self, live: LiveRequest, now_s: float) -> None:
        request, tokens = live.request, most_tokens(live.request)
        self._tokens[request.lane] += tokens
        of_tenant = self._parts[request.lane].setdefault(request.tenant, {})
        part = of_tenant.setdefault(request.model, Part(request.tenant, request.model))
        part.tokens += tokens
        if live.state is State.WAITING:
            # Not since its arrival, which may have been long before this scheduler took it over.
            part.arrivals.set(request.request_id, now_s, live.ordinal)

    def left(self, live: LiveRequest, now_s: float) -> None:
        """Before its state changes."""
        request, tokens = live.request, most_tokens(live.request)
        self._tokens[request.lane] -= tokens
        self.drain.left(tokens, now_s)
        of_tenant = self._parts[request.lane][request.tenant]
        part = of_tenant[request.model]
        part.tokens -= tokens
        part.arrivals.discard(request.request_id)
        if not part.tokens:
            del of_tenant[request.model]
            if not of_tenant:
                del self._parts[request.lane][request.tenant]

    def tokens(self, *lanes: Lane) -> int:
        """Of all queued requests of these lanes, prompts and the output they may make."""
        return sum(self._tokens[lane] for lane in lanes)

    def num_waiting(self, tenant: str) -> int:
        """Requests of a tenant that have never run."""
        return sum(len(part.arrivals) for tenants in self._parts.values() for part in tenants.get(tenant, {}).values())

    def parts(self, lane: Lane) -> Iterator[Part]:
        """All that wait in a lane."""
        for of_tenant in self._parts[lane].values():
            yield from of_tenant.values()
