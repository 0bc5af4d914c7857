"""How many tokens a request will still make: as many as it asks for, or as its tenant's requests made before.

Clients that set max_tokens with care are taken at their word; those whose requests use less than half of it are judged by the
lengths of their outputs. Must not know: queues, the order in which requests run.
"""

from __future__ import annotations

from tokenmill_scheduler.core.lengths import OutputLengths
from tokenmill_scheduler.core.live import LiveRequest
from tokenmill_scheduler.core.request import Request

# Below this share of max_tokens that is used, a tenant's max_tokens says little.
CARELESS = 0.5
# Weight of the latest observation.
_GAIN = 0.1
# Tenants come and go: those that ended something the longest time ago are forgotten.
MAX_TENANTS = 1_000


class Prediction:
    """Constant time and memory an observation."""

    def __init__(self, lengths: OutputLengths) -> None:
        self.lengths = lengths
        # Of max_tokens, the share that a tenant's requests used: an exponentially weighted mean.
        self._used: dict[str, float] = {}

    def observe(self, request: Request, length: int) -> None:
        """A request has ended by itself after `length` tokens of output."""
        self.lengths.observe(request.tenant, request.model, length)
        share = length / request.sampling.max_tokens
        used = self._used.pop(request.tenant, share)
        self._used[request.tenant] = used + _GAIN * (share - used)
        if len(self._used) > MAX_TENANTS:
            del self._used[next(iter(self._used))]

    def remaining(self, live: LiveRequest) -> int:
        """At least 1. One that has outgrown what was expected of it may go on as long as it may."""
        made, most = len(live.output), live.request.sampling.max_tokens
        expected = self._expected(live.request)
        return max(1, (expected if expected > made else most) - made)

    def _expected(self, request: Request) -> int:
        most = request.sampling.max_tokens
        if self._used.get(request.tenant, 1.0) >= CARELESS:
            return most
        expected = self.lengths.expected(request.tenant, request.model)
        return most if expected is None else min(most, expected)
