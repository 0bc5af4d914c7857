"""What came of a load, foretold and measured in the same columns. Must not know: journals, how figures are shown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from statistics import fmean
from typing import Self

import numpy as np
from tokenmill_cli.bench.figures import figures
from tokenmill_cli.bench.runner import WorkloadRun
from tokenmill_simulator.compare import Run
from tokenmill_simulator.cost import ServiceCost
from tokenmill_simulator.measures import Floats


@dataclass(frozen=True, slots=True)
class Medians:
    """Times in milliseconds. `beside_core`: of the time to first token, what no queue and no step took."""

    output_tokens_per_s: float
    time_to_first_token: float
    time_per_output_token: float
    latency: float
    beside_core: float

    @classmethod
    def middle(cls, several: Iterable[Self]) -> Self:
        return cls(*map(fmean, zip(*map(astuple, several), strict=True)))


@dataclass(frozen=True, slots=True)
class Outcome:
    """Rows are the requests in the order of their arrival, columns their times to first token, per output token (NaN: it has one
    token) and to the end, in milliseconds."""

    output_tokens_per_s: float
    latencies: Floats
    beside_core: float

    def medians(self) -> Medians:
        """Of an even number the lower of the two in the middle, as in `tokenmill bench`."""
        first_token, per_output_token, latency = np.nanpercentile(self.latencies, 50, axis=0, method="inverted_cdf").tolist()
        return Medians(self.output_tokens_per_s, first_token, per_output_token, latency, self.beside_core)


def foretold(done: Run, service: ServiceCost) -> Outcome:
    """Raises AssertionError when a request did not end."""
    measures = done.measures
    assert measures.done.all(), "the simulation left requests behind"
    since_first_s = measures.last_token_s - measures.first_token_s
    behind = np.where(measures.tokens > 1, measures.tokens - 1, np.nan)
    columns = (measures.time_to_first_token_s, since_first_s / behind, measures.latency_s)
    return Outcome(done.figures.output_tokens_per_s, np.column_stack(columns) * 1e3, service.client_s * 1e3)


def measured(run: WorkloadRun, client_s: float) -> Outcome:
    timings = run.timings
    rows = [(timing.time_to_first_token_s, timing.time_per_output_token_s, timing.latency_s) for timing in timings]
    return Outcome(figures([run]).output_tokens_per_s, np.array(rows, dtype=np.float64) * 1e3, client_s * 1e3)


def by_request(pairs: Sequence[tuple[Outcome, Outcome]]) -> list[float]:
    """Of the latencies, what was foretold over what was measured: the median over the requests of all pairs."""
    ratios = np.concatenate([first.latencies / second.latencies for first, second in pairs])
    return [float(ratio) for ratio in np.nanmedian(ratios, axis=0)]
