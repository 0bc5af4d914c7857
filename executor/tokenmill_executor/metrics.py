"""What the executor does, as Prometheus has it: told of each answer on the event loop, gathered there when a scrape asks.

Must not know: gRPC, who scrapes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from tokenmill_service.histogram import SHORT_SECONDS, Histogram
from tokenmill_service.metrics import histogram_family

from tokenmill_executor.records import Blocks, Result, SequenceFault
from tokenmill_executor.wire import ServiceTimes

_PREFIX = "tokenmill_executor_"


@dataclass(frozen=True, slots=True)
class Offload:
    """The host tier: blocks it can hold and holds, and such as moved out to it, back in, or left the cache from it."""

    total: int = 0
    used: int = 0
    copied_out: int = 0
    copied_in: int = 0
    dropped: int = 0


class Metrics:
    """`plans_queued` are those received and not answered. `blocks` stand as after the last step; None before the model is loaded.

    `evicted_blocks` were cached, and were taken for other use. `offload` is None without a host tier. `integrity_failures` are
    looks at idle times that found books that do not balance.
    """

    def __init__(self) -> None:
        self.plans_queued = 0
        self.blocks: Blocks | None = None
        self.evicted_blocks = 0
        self.offload: Offload | None = None
        self.integrity_failures = 0
        # What serves, by the names of labels.
        self.description: Mapping[str, str] = {}
        self._plans = 0
        self._steps = 0
        self._computed_tokens = 0
        self._cached_tokens = 0
        self._sampled_tokens = 0
        self._wait_s = 0.0
        self._parts = {part: Histogram(SHORT_SECONDS) for part in ("queue", "prepare", "forward", "sample")}
        self._faults: Counter[SequenceFault] = Counter()

    def carried_out(self, result: Result, times: ServiceTimes) -> None:
        self.blocks = result.blocks
        self._plans += 1
        self._steps += result.num_steps
        self._computed_tokens += sum(result.num_computed)
        self._cached_tokens += sum(result.num_cached)
        self._sampled_tokens += len(result.token_ids)
        self._wait_s += times.idle_s
        self._parts["queue"].observe(times.queue_s)
        steps, parts = result.num_steps, result.times
        for part, seconds in (("prepare", parts.prepare_s), ("forward", parts.forward_s), ("sample", parts.sample_s)):
            self._parts[part].observe(seconds / steps, steps)
        if result.faults:
            self._faults.update(fault.fault for fault in result.faults)

    def families(self) -> list[Metric]:
        parts = [((part,), histogram) for part, histogram in self._parts.items()]
        faults = {fault.name.lower(): self._faults[fault] for fault in SequenceFault}
        blocks = self.blocks or Blocks(0, 0, 0)
        offload = self.offload or Offload()
        host = {"used": offload.used, "free": offload.total - offload.used}
        copies = {"out": offload.copied_out, "in": offload.copied_in}
        held = {"held": blocks.held, "cached": blocks.cached, "free": blocks.free}
        return [
            InfoMetricFamily("tokenmill_executor", "What serves here", dict(self.description)),
            _counter("plans", "Plans carried out", self._plans),
            _counter("steps", "Their steps, each a forward pass", self._steps),
            histogram_family(
                f"{_PREFIX}step_seconds", "Of each step, by part; queue is of each plan, before it begins", ("part",), parts
            ),
            _counter("wait_seconds", "Waited for a plan with nothing to do", self._wait_s),
            _counter("computed_tokens", "Tokens that went through the model", self._computed_tokens),
            _counter("cached_tokens", "Tokens taken from the prefix cache instead", self._cached_tokens),
            _counter("sampled_tokens", "Tokens made", self._sampled_tokens),
            _labelled(GaugeMetricFamily(f"{_PREFIX}blocks", "KV blocks", labels=["state"]), held),
            _counter("evicted_blocks", "Cached blocks that were taken for other use", self.evicted_blocks),
            _labelled(
                GaugeMetricFamily(f"{_PREFIX}kv_offload_blocks", "Blocks of host memory for those evicted", labels=["state"]), host
            ),
            _labelled(
                CounterMetricFamily(f"{_PREFIX}kv_offload_copied_blocks", "Blocks copied to and from it", labels=["direction"]),
                copies,
            ),
            _counter("kv_offload_dropped_blocks", "Blocks that left the prefix cache from host memory", offload.dropped),
            _counter("integrity_failures", "Looks at idle times that found KV blocks miscounted", self.integrity_failures),
            _labelled(CounterMetricFamily(f"{_PREFIX}faults", "Sequences a step could not advance", labels=["fault"]), faults),
            GaugeMetricFamily(f"{_PREFIX}plans_queued", "Plans received and not answered", self.plans_queued),
        ]


def _counter(name: str, documentation: str, value: float) -> Metric:
    return CounterMetricFamily(_PREFIX + name, documentation, value)


def _labelled(family: GaugeMetricFamily | CounterMetricFamily, values: Mapping[str, float]) -> Metric:
    """With one label."""
    for label, value in values.items():
        family.add_metric((label,), value)
    return family
