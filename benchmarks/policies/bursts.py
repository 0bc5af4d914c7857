"""The burst workload: static against continuous batching, with equal slots and with half of them.

Must not know: traces, policies.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from tokenmill_simulator.compare import Run, candidate, machines, run
from tokenmill_simulator.figures import Target
from tokenmill_simulator.presets import preset
from tokenmill_simulator.requests import mixed
from tokenmill_workloads import burst

from benchmarks.policies.packing import steps_in_order, steps_packed
from benchmarks.policies.table import table

CPU = "cpu-smollm2-bf16"
_BAR = 1.6
_SLOTS = 8
_SEED, _OTHER_SEEDS = 42, range(1, 61)
_CLAIM = """\
“40–60 % less time, 80–150 % more tokens/s” is what is often claimed for continuous batching. With equal slots, prefill paid for and
a step with a fixed cost it becomes what the table says: {less:.0%} less time and {more:.0%} more tokens/s for the burst of seed
{seed}, and a median of {median:.2f}× over {seeds} other bursts ({low:.2f}–{high:.2f}×). A decode step of this machine takes nearly
the same time with one sequence as with eight, because reading the weights is most of it; so what counts is the number of steps: the
sum of each batch's longest output, against one stream that refills its slots. The gain ends where the queue does: the last requests
of a burst run in ever emptier steps under both, and 20 requests are only two and a half times the slots. The claimed figures appear
when static batching has half the slots: {half_less:.0%} less time and {half_more:.0%} more tokens/s. More slots for less padding is
a real gain of paged KV, but it is another one."""
_BOUND = """\
What there is to gain: begun in the order in which they came, with no slot empty while a request waits, these outputs take {least}
steps. Continuous batching took {taken}, static batching {static}, which is {allowed:.2f} times that least: in this order
{bar}× is {reach}. The other bursts allow {median:.2f}× ({low:.2f}–{high:.2f}×), and continuous batching lost
{lost} in any of them. Whoever knows the lengths and begins with the longest can do better: packed without a gap at the end,
these outputs would take {packed} steps, and static batching in the order in which they came {best:.2f} times as many."""


@dataclass(frozen=True, slots=True)
class _Pair:
    """One burst under static and continuous batching with equal slots; `least`: the steps that its order asks for."""

    static: Run
    continuous: Run
    least: int

    @property
    def gain(self) -> float:
        return self.static.figures.wall_s / self.continuous.figures.wall_s

    @property
    def allowed(self) -> float:
        """The gain in steps, were none lost."""
        return self.static.figures.steps / self.least

    @property
    def lost(self) -> int:
        return self.continuous.figures.steps - self.least


def bursts(name: str) -> str:
    """On one machine of this preset."""
    pair, half = _pair(name, _SEED), _run(name, "static:4", _SEED)
    columns = ("burst of 20", "wall time", "steps", "output tokens/s", "occupancy", "mean latency of the shortest third")
    rows = [_row(run) for run in (pair.static, pair.continuous, half)]
    half_gain = half.figures.wall_s / pair.continuous.figures.wall_s
    ratios = f"Continuous over static: {pair.gain:.2f}× at equal slots, {half_gain:.2f}× against half of them."
    text = f"## The burst on {name}\n\n{table(columns, rows)}\n{ratios}"
    if name == CPU:
        return f"{text}\n"
    others = [_pair(name, seed) for seed in _OTHER_SEEDS]
    verdict = "met" if pair.gain >= _BAR else "missed"
    return f"{text} Bar at equal slots: ≥ {_BAR}×; {verdict}.\n\n{_bound(pair, others)}\n\n{_claim(pair, half_gain, others)}\n"


def _row(run: Run) -> tuple[str, ...]:
    figures = run.figures
    wall, rate, occupancy = f"{figures.wall_s:.2f} s", f"{figures.output_tokens_per_s:.0f}", f"{figures.occupancy:.0%}"
    return run.name, wall, f"{figures.steps}", rate, occupancy, f"{_short_latency_s(run):.2f} s"


def _bound(pair: _Pair, others: list[_Pair]) -> str:
    allowed = [other.allowed for other in others]
    lost, static = max(other.lost for other in others), pair.static.figures.steps
    packed = steps_packed([arrival.output_tokens for arrival in burst(seed=_SEED)], _SLOTS)
    return _BOUND.format(
        least=pair.least,
        taken=pair.continuous.figures.steps,
        static=static,
        allowed=pair.allowed,
        bar=_BAR,
        reach="there to be had" if pair.allowed >= _BAR else "more than any scheduler can reach",
        median=np.median(allowed),
        low=min(allowed),
        high=max(allowed),
        lost=f"up to {lost} steps" if lost else "no step",
        packed=packed,
        best=static / packed,
    )


def _claim(pair: _Pair, half_gain: float, others: list[_Pair]) -> str:
    gains = [other.gain for other in others]
    return _CLAIM.format(
        less=1 - 1 / pair.gain,
        more=pair.gain - 1,
        half_less=1 - 1 / half_gain,
        half_more=half_gain - 1,
        seed=_SEED,
        median=np.median(gains),
        low=min(gains),
        high=max(gains),
        seeds=len(gains),
    )


def _short_latency_s(run: Run) -> float:
    measures = run.measures
    short = np.argsort(measures.tokens, kind="stable")[: max(1, len(measures.tokens) // 3)]
    return float((measures.ended_s - measures.arrival_s)[short].mean())


def _pair(name: str, seed: int) -> _Pair:
    least = steps_in_order([arrival.output_tokens for arrival in burst(seed=seed)], _SLOTS)
    return _Pair(_run(name, f"static:{_SLOTS}", seed), _run(name, f"continuous:{_SLOTS}", seed), least)


def _run(name: str, way: str, seed: int) -> Run:
    requests = mixed(burst(seed=seed))
    on = machines(preset(name), requests)
    return run(way, candidate(way, on.config()), requests, on, Target())
