"""A run summed up in figures, for tables and JSON. Must not know: the core, how figures are shown."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from tokenmill_scheduler.core.counters import Counters

from tokenmill_simulator.measures import Floats, Measures


@dataclass(frozen=True, slots=True)
class Target:
    """What a request needs to be served well: its first token in time, then a token so often on average. Seconds."""

    ttft_s: float = 1.0
    itl_s: float = 0.1


@dataclass(frozen=True, slots=True)
class Spread:
    """Seconds. All 0 when there is nothing."""

    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0


@dataclass(frozen=True, slots=True)
class Figures:
    """Rates are per second of `wall_s`, from the first arrival to the last end.

    - not_done: refused, expired, or failed for want of room. refused: at submit, for good. refusals: of all tries, those that come
      again among them.
    - goodput: requests a second that met the target; goodput_share: of all requests.
    - occupancy: sequences in a step / slots. kv_usage: blocks held / all blocks. queue: requests waiting. Their means are over the
      time of steps. busy: time of steps / time of executors.
    - lanes: time to first token by lane, where there are several.
    """

    requests: int
    not_done: int
    refused: int
    refusals: int
    prompt_tokens: int
    output_tokens: int
    wall_s: float
    requests_per_s: float
    output_tokens_per_s: float
    goodput: float
    goodput_share: float
    time_to_first_token_s: Spread
    inter_token_s: Spread
    latency_s: Spread
    queue_time_s: Spread
    lanes: dict[str, Spread]
    occupancy: float
    busy: float
    kv_usage_mean: float
    kv_usage_max: float
    queue_mean: float
    queue_max: int
    preemptions: int
    prefix_hit_share: float
    steps: int
    step_s: float


def summarise(measures: Measures, counters: Counters, slots: int, executors: int, target: Target) -> Figures:
    """`slots` are those of one of the executors, which are all alike."""
    ended = measures.ended_s[~np.isnan(measures.ended_s)]
    wall_s = float(ended.max() - measures.arrival_s.min()) if len(ended) else 0.0
    met = int(measures.met(target.ttft_s, target.itl_s).sum())
    output_tokens = int(measures.tokens.sum())
    steps = measures.steps
    seconds = np.array([step.end_s - step.start_s for step in steps])
    kv_usage = np.array([step.blocks.held / step.blocks.total for step in steps])
    waiting = np.array([step.waiting for step in steps])
    return Figures(
        requests=len(measures.requests),
        not_done=len(measures.requests) - int(measures.done.sum()),
        refused=int(measures.refused.sum()),
        refusals=measures.refusals,
        prompt_tokens=sum(request.arrival.prompt_tokens for request in measures.requests),
        output_tokens=output_tokens,
        wall_s=wall_s,
        requests_per_s=_ratio(int(measures.done.sum()), wall_s),
        output_tokens_per_s=_ratio(output_tokens, wall_s),
        goodput=_ratio(met, wall_s),
        goodput_share=met / len(measures.requests),
        time_to_first_token_s=spread(measures.time_to_first_token_s),
        inter_token_s=spread(measures.inter_token_s),
        latency_s=spread(measures.latency_s),
        queue_time_s=spread(measures.queue_time_s),
        lanes=_by_lane(measures),
        occupancy=_over_time(np.array([step.sequences for step in steps]) / slots, seconds),
        busy=_ratio(float(seconds.sum()), wall_s * executors),
        kv_usage_mean=_over_time(kv_usage, seconds),
        kv_usage_max=float(kv_usage.max(initial=0.0)),
        queue_mean=_over_time(waiting, seconds),
        queue_max=int(waiting.max(initial=0)),
        preemptions=counters.preemptions,
        prefix_hit_share=_ratio(counters.prefix_cache_hits, counters.prefix_cache_queries),
        steps=len(steps),
        step_s=float(seconds.mean()) if len(steps) else 0.0,
    )


def spread(values: Floats) -> Spread:
    if not len(values):
        return Spread()
    return Spread(float(values.mean()), *[float(cut) for cut in np.percentile(values, (50, 90, 99))])


def _by_lane(measures: Measures) -> dict[str, Spread]:
    lanes = np.array([request.lane for request in measures.requests])
    present = sorted({request.lane for request in measures.requests})
    times = measures.first_token_s - measures.arrival_s
    return {lane.name.lower(): spread(times[(lanes == lane) & ~np.isnan(times)]) for lane in present if len(present) > 1}


def _over_time(values: Floats, seconds: Floats) -> float:
    total = float(seconds.sum())
    return float((values * seconds).sum()) / total if total else 0.0


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
