"""How long to go on trying, and how long to wait in between. Must not know: gRPC, asyncio; time and randomness are passed in."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Bounded exponential backoff with jitter; all in seconds.

    `call_limit_s` bounds a call, and a stream whose request is not yet known to be accepted; `attach_limit_s` bounds a stream whose
    request is: it is durable, so waiting for a scheduler to come back is worth more. Both are counted from the first failure since
    the last progress, and progress is bounded, so every call ends.
    """

    first_delay_s: float = 0.05
    longest_delay_s: float = 1.0
    call_limit_s: float = 5.0
    attach_limit_s: float = 60.0


class Backoff:
    """The waits of one call. `reset` on progress."""

    def __init__(self, policy: RetryPolicy) -> None:
        self._policy = policy
        self._failures = 0
        self._first_failure_s = 0.0

    def reset(self) -> None:
        self._failures = 0

    def next_delay_s(self, now_s: float, limit_s: float, jitter: float, at_least_s: float = 0.0) -> float | None:
        """Seconds to wait after a failure at `now_s`; None when `limit_s` is over. `jitter` in [0, 1) spreads clients apart.

        `at_least_s` is what the server asked for, heeded up to the policy's longest delay.
        """
        if self._failures == 0:
            self._first_failure_s = now_s
        remaining_s = self._first_failure_s + limit_s - now_s
        if remaining_s <= 0:
            return None
        policy = self._policy
        # 2**60 s is longer than any limit; the bound keeps the power from overflowing.
        delay_s = min(policy.longest_delay_s, math.ldexp(policy.first_delay_s, min(self._failures, 60)))
        delay_s = max(delay_s * (0.5 + jitter / 2), min(at_least_s, policy.longest_delay_s))
        self._failures += 1
        return min(delay_s, remaining_s)
