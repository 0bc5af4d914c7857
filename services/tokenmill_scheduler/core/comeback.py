"""When a client that was refused should come again: as soon as there will probably be room for it, and not all at once.

From the rate at which requests and tokens leave the queue. Those refused one after another are sent for one after another: what was
promised to one is not promised to the next. Pure; must not know: requests, the clock.
"""

from __future__ import annotations

from tokenmill_scheduler.core.drain import Rate

# Before anything is measured.
UNKNOWN_S = 1.0
LEAST_S, MOST_S = 0.1, 60.0


def delay_s(amount: float, per_s: float) -> float:
    """How long so much takes at this rate, within bounds; `per_s` 0: not known."""
    return UNKNOWN_S if per_s <= 0 else min(max(amount / per_s, LEAST_S), MOST_S)


class Comebacks:
    """Of one queue."""

    def __init__(self) -> None:
        # Until when what leaves the queue is promised to those refused before.
        self._promised_s = float("-inf")

    def next_s(self, requests: int, tokens: int, per_s: tuple[Rate, Rate], now_s: float, least_s: float = LEAST_S) -> float:
        """Seconds until so many requests, of so many tokens in all, may find room; `per_s` are the rates at which both leave."""
        rates = per_s[0].per_s(now_s), per_s[1].per_s(now_s)
        if not all(rates):
            return max(UNKNOWN_S, least_s)
        needed_s = max(requests / rates[0], tokens / rates[1])
        self._promised_s = min(max(self._promised_s, now_s) + needed_s, now_s + MOST_S)
        return min(max(self._promised_s - now_s, least_s), MOST_S)
