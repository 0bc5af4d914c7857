"""A histogram of one owner's thread: a bisect and two additions a value, or for many equal values at once.

prometheus_client's own takes a lock and looks labels up for each value: with 256 sequences decoding, that is too much a step.
"""

from __future__ import annotations

from bisect import bisect_left

# Seconds, in steps of about a half and a double: from what one step of a small model takes to what a full queue costs.
SECONDS = (
    0.0005, 0.001, 0.0025, 0.005, 0.0075, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75,
    1.0, 2.0, 3.0, 5.0, 7.5, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0,
)  # fmt: skip
# Of what a service does by itself, between its parts.
SHORT_SECONDS = (0.0001, 0.00025, *SECONDS[: SECONDS.index(10.0) + 1])
SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)
# As vLLM has them for tokens in a step.
TOKENS = (1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)


class Histogram:
    """`counts[i]` values were at most `bounds[i]` and above the bound before; the last count is of those above all bounds."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times
