"""How long to go on trying, and how long to wait in between. Must not know: gRPC, asyncio; time and randomness are passed in."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Bounded exponential backoff with jitter; all in seconds, but for `growth`, the factor from one wait to the next.

    `growth` keeps a wait in proportion to the outage: a scheduler that is back after a second is found within a third of one more.
    `call_limit_s` bounds a call, and the stream of a new request that is not yet known to be accepted. `attach_limit_s` bounds a
    stream whose request is: it is durable, so waiting for a machine to boot and a scheduler to come back is worth more. It does not
    count where the stream was given a timeout of its own. Both are counted from the first failure since the last progress, and
    progress is bounded, so every call ends.
    """

    first_delay_s: float = 0.05
    longest_delay_s: float = 1.0
    growth: float = 1.3
    call_limit_s: float = 5.0
    attach_limit_s: float = 300.0


class Backoff:
    """The waits of one call. `reset` on progress."""

    def __init__(self, policy: RetryPolicy) -> None:
        self._policy = policy
        self._first_failure_s = 0.0
        self.reset()

    def reset(self) -> None:
        # None until the first failure.
        self._delay_s: float | None = None

    def next_delay_s(self, now_s: float, limit_s: float, jitter: float, at_least_s: float = 0.0) -> float | None:
        """Seconds to wait after a failure at `now_s`; None when `limit_s` is over. `jitter` in [0, 1) spreads clients apart.

        `at_least_s` is what the server asked for, heeded up to the policy's longest delay.
        """
        policy = self._policy
        if self._delay_s is None:
            self._first_failure_s, self._delay_s = now_s, policy.first_delay_s
        remaining_s = self._first_failure_s + limit_s - now_s
        if remaining_s <= 0:
            return None
        delay_s = max(self._delay_s * (0.5 + jitter / 2), min(at_least_s, policy.longest_delay_s))
        self._delay_s = min(policy.longest_delay_s, self._delay_s * policy.growth)
        return min(delay_s, remaining_s)
