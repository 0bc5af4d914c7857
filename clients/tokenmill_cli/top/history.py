"""The last looks at a scheduler, and what they come to: rates, series and percentiles of a while. No I/O, no drawing."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice, pairwise

from tokenmill_client.admin_records import Executor, LatencyHistogram, Load
from tokenmill_client.records import RequestInfo

KEEP = 600
RATE_S = 5.0
WINDOW_S = 60.0

Count = Callable[[Load], float]


@dataclass(frozen=True, slots=True)
class Look:
    """`at_s` is of a monotonic clock. `oldest` are requests that have not ended, the oldest first."""

    at_s: float
    load: Load
    executors: tuple[Executor, ...]
    oldest: tuple[RequestInfo, ...]


class History:
    def __init__(self) -> None:
        self._looks: deque[Look] = deque(maxlen=KEEP)

    def add(self, look: Look) -> None:
        """A scheduler that counts less than before has been started anew: what was before is no past of it."""
        if self._looks and look.load.steps < self.last.load.steps:
            self._looks.clear()
        self._looks.append(look)

    @property
    def last(self) -> Look:
        return self._looks[-1]

    def rate(self, count: Count) -> float:
        """Of a counter, a second, over the last few seconds."""
        first = self._since(RATE_S)
        seconds = self.last.at_s - first.at_s
        return (count(self.last.load) - count(first.load)) / seconds if seconds > 0 else 0.0

    def rates(self, count: Count) -> list[float]:
        """A second, from each look to the next."""
        return [(count(b.load) - count(a.load)) / (b.at_s - a.at_s) for a, b in pairwise(self._looks)]

    def occupancies(self) -> list[float]:
        """Mean batch occupancy, 0 to 1, from each look to the next; 0 where no step was made."""
        return [
            (b.load.batch_occupancy_sum - a.load.batch_occupancy_sum) / (b.load.steps - a.load.steps)
            if b.load.steps > a.load.steps
            else 0.0
            for a, b in pairwise(self._looks)
        ]

    def waiting(self) -> list[float]:
        """Requests that waited, at each look but the first, so that all series have one scale."""
        return [float(look.load.num_requests_waiting) for look in islice(self._looks, 1, None)]

    def window_s(self, looks: int) -> float:
        """From how long ago the last so many steps of a series are."""
        return self.last.at_s - self._looks[max(0, len(self._looks) - 1 - looks)].at_s

    @property
    def latencies_s(self) -> float:
        """Over how long latencies are taken; 0: over all time."""
        return self.last.at_s - self._since(WINDOW_S).at_s

    def percentiles(self, latency: Callable[[Load], LatencyHistogram], shares: tuple[float, ...]) -> list[float | None]:
        """Seconds, of the last minute or since the first look, if that is later; None where nothing was measured.

        The first look knows only of all time.
        """
        first = self._since(WINDOW_S)
        counts = list(latency(self.last.load).counts)
        if first is not self.last:
            counts = [after - before for after, before in zip(counts, latency(first.load).counts, strict=True)]
        return [percentile(latency(self.last.load).bounds, counts, share) for share in shares]

    def _since(self, seconds: float) -> Look:
        """The first look of the last `seconds`, and one before the last if there is any."""
        earlier = [look for look in self._looks if look.at_s >= self.last.at_s - seconds]
        if len(earlier) == 1 and len(self._looks) > 1:
            return self._looks[-2]
        return earlier[0]


def percentile(bounds: tuple[float, ...], counts: list[int], share: float) -> float | None:
    """As Prometheus's histogram_quantile: values are taken to be spread evenly over a bucket, and none above the last bound."""
    rank, reached = share * sum(counts), 0
    if not sum(counts):
        return None
    for index, (bound, count) in enumerate(zip(bounds, counts, strict=False)):
        if count and reached + count >= rank:
            low = bounds[index - 1] if index else 0.0
            return low + (bound - low) * (rank - reached) / count
        reached += count
    return bounds[-1]
