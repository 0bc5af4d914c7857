"""The scheduler's figures as Prometheus has them, gathered when a scrape asks. Names are vLLM's where the meaning is the same.

No label has a value that clients choose: lanes, policies, reasons and states are few, and executors are those that were driven.
Must not know: SQL, gRPC, who scrapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from tokenmill_service.histogram import Histogram
from tokenmill_service.metrics import histogram_family

from tokenmill_scheduler.core.counters import Preemption
from tokenmill_scheduler.core.scheduler import Scheduler
from tokenmill_scheduler.core.waiting import WaitCode
from tokenmill_scheduler.desk.records import ExecutorStatus
from tokenmill_scheduler.latency import Latency
from tokenmill_scheduler.ledger.writer import LedgerWriter
from tokenmill_scheduler.loop import Loop
from tokenmill_scheduler.overview import executor_statuses
from tokenmill_scheduler.pacing import Pacer

_PREFIX = "tokenmill_"


class Exposition:
    """Calling it gathers; on the event loop's thread. `refusals` are the reasons that a submit can be refused for."""

    def __init__(self, scheduler: Scheduler, loop: Loop, writer: LedgerWriter, refusals: Sequence[str]) -> None:
        self._refusals = refusals
        self._scheduler = scheduler
        self._loop = loop
        self._metrics = loop.metrics
        self._writer = writer

    def __call__(self) -> list[Metric]:
        self._metrics = self._loop.metrics
        return [*self._latencies(), *self._requests(), *self._tokens(), *self._steps(), *self._executors(), *self._ledger()]

    def _latencies(self) -> Iterator[Metric]:
        metrics = self._metrics
        yield _latency("scheduling_delay_seconds", "From durable to its first plan", metrics.scheduling_delay)
        yield _latency("request_queue_time_seconds", "From arrival to its first plan", metrics.queue_time)
        yield _latency("time_to_first_token_seconds", "From arrival to its first durable token", metrics.time_to_first_token)
        yield _latency(
            "inter_token_latency_seconds",
            "From one durable token to the next; over what a speculative step brings together, once",
            metrics.inter_token,
        )
        yield _latency(
            "e2e_request_latency_seconds", "From arrival to its durable end, of requests that are done", metrics.end_to_end
        )

    def _requests(self) -> Iterator[Metric]:
        metrics, scheduler, now_s = self._metrics, self._scheduler, self._loop.clock()
        lanes = {lane.name.lower(): gauge for lane, gauge in metrics.lanes.items()}
        running = {lane.name.lower(): count for lane, count in scheduler.running_by_lane().items()}
        waiting = {lane: len(gauge.waiting) for lane, gauge in lanes.items()}
        oldest = {lane: gauge.oldest_wait_s(now_s) for lane, gauge in lanes.items()}
        accepted = {lane.name.lower(): count for lane, count in metrics.accepted.items()}
        yield _gauge("num_requests_running", "Requests in the batches that executors carry out", "lane", running)
        yield _gauge("num_requests_waiting", "Requests in the queue", "lane", waiting)
        yield _gauge("requests_waiting_by_reason", "Requests in the queue, by why they wait", "reason", self._wait_reasons())
        yield _gauge("oldest_wait_seconds", "Of the request in the queue that has waited longest", "lane", oldest)
        yield _counter("requests_accepted", "Requests that became durable; each choice of one is one", "lane", accepted)
        yield _counter(
            "request_success", "Requests that ended, by how; each choice of one is one", "finished_reason", metrics.finished
        )
        refused = {**dict.fromkeys(self._refusals, 0), **metrics.refused}
        yield _counter("requests_refused", "Submits that were refused, by the reason in their status", "reason", refused)
        yield _gauge("queue_paused", "1 while an operator holds the queue", value=bool(scheduler.paused))
        yield _gauge(
            "overload_stage",
            "0 normal, 1 batch lane in what others leave, 2 batch lane paused, 3 standard lane refused",
            value=scheduler.overload_stage,
        )
        yield _counter("overload_changes", "From one stage to the next, up or down", value=scheduler.counters.overload_changes)
        yield _gauge("streams_open", "Readers of requests' output", value=self._loop.live.num_readers)
        yield InfoMetricFamily(
            f"{_PREFIX}scheduler",
            "What decides the order and the batch",
            {"policy": scheduler.ordering.policy.name, "batching": scheduler.config.batching},
        )

    def _wait_reasons(self) -> dict[str, int]:
        """With 0 for the others."""
        codes = [code for code in WaitCode if code is not WaitCode.ELSEWHERE]
        return {**dict.fromkeys(map(str, codes), 0), **self._scheduler.wait_reasons()}

    def _tokens(self) -> Iterator[Metric]:
        counters = self._scheduler.counters
        yield _counter("prompt_tokens", "Of requests at their first admission", value=counters.prompt_tokens)
        yield _counter("generation_tokens", "Kept output tokens", value=counters.output_tokens)
        yield _counter("recomputed_tokens", "Computed before a preemption, and again after it", value=counters.recomputed_tokens)
        yield _counter("prefix_cache_queries", "Tokens looked up in prefix caches", value=counters.prefix_cache_queries)
        yield _counter("prefix_cache_hits", "Those of them that were there", value=counters.prefix_cache_hits)

    def _steps(self) -> Iterator[Metric]:
        metrics, counters = self._metrics, self._scheduler.counters
        preempted = {cause: counters.preempted[cause] for cause in Preemption}
        memory = {"preempted": preempted[Preemption.OUT_OF_BLOCKS], "refused": counters.no_blocks}
        yield _histogram("batch_occupancy", "Sequences in a step over the most there may be", metrics.batch_occupancy)
        yield _histogram("iteration_tokens_total", "Tokens computed in a step", metrics.iteration_tokens)
        yield _histogram("plan_round_trip_seconds", "From plan to result, less the executor's time on it", metrics.round_trip)
        yield _counter("steps", "Plans answered", value=counters.steps)
        yield _counter("num_preemptions", "Running requests put back into the queue", "reason", preempted)
        yield _counter(
            "out_of_memory_events",
            "Sequences preempted because KV blocks ran out, and those that an executor had no block for against the forecast",
            "event",
            memory,
        )
        yield _counter("stale_results", "Results and rows of results that nobody wanted any more", value=counters.stale_results)

    def _executors(self) -> Iterator[Metric]:
        known = executor_statuses(self._loop)
        there = [executor for executor in known if executor.connected]

        def each(figure: Callable[[ExecutorStatus], float], among: Sequence[ExecutorStatus] = there) -> dict[str, float]:
            return {executor.name: figure(executor) for executor in among}

        yield _gauge(
            "kv_cache_usage_perc",
            "Held blocks over all, from 0 to 1; what is cached and not held counts as free",
            value=self._scheduler.kv_cache_usage,
        )
        yield _blocks(there)
        yield _gauge("executor_up", "1 while it is driven", "executor", each(lambda e: e.connected, known))
        yield _gauge("executor_draining", "1 while an operator keeps work off it", "executor", each(lambda e: e.draining, known))
        yield _gauge("batch_occupancy_perc", "Of the last step; 0 while nothing runs", "executor", each(self._occupancy))
        yield _gauge("max_num_seqs", "Most sequences in a step", "executor", each(lambda e: self._scheduler.max_num_seqs(e.name)))
        yield _gauge("plans_out", "Plans not answered yet", "executor", each(lambda e: self._pacer(e).plans_out))
        yield _gauge(
            "idle_share",
            "Of the time since it joined, that it waited while work waited",
            "executor",
            each(lambda e: e.idle_share),
        )
        yield _counter("idle_seconds", "Waited while work waited", "executor", each(lambda e: self._pacer(e).idle_s))
        yield _counter("busy_seconds", "Spent on steps", "executor", each(lambda e: self._pacer(e).busy_s))

    def _pacer(self, executor: ExecutorStatus) -> Pacer:
        return self._loop.drives[executor.name].pacer

    def _occupancy(self, executor: ExecutorStatus) -> float:
        return self._metrics.last_occupancy.get(executor.name, 0.0) if executor.running else 0.0

    def _ledger(self) -> Iterator[Metric]:
        yield _histogram("ledger_lag_seconds", "From a record's handing over to its being durable", self._metrics.ledger_lag)
        yield _gauge("ledger_backlog", "Records not yet durable", value=self._writer.backlog)
        yield _gauge(
            "ledger_oldest_record_seconds", "Age of the oldest record that is not durable", value=self._writer.oldest_age_s()
        )
        yield _gauge("ledger_unavailable", "1 while the database takes no writes", value=self._writer.outage is not None)
        yield _counter("ledger_commits", "Transactions", value=self._writer.commits)
        yield _counter("ledger_records", "Records made durable", value=self._writer.records)


# ---- families ------------------------------------------------------------------------------------------------------------------

# By the label's value.
_Values = Mapping[Any, float]


def _gauge(name: str, documentation: str, label: str = "", values: _Values | None = None, value: float = 0.0) -> Metric:
    """One sample for each value of the label, or one without."""
    family = GaugeMetricFamily(_PREFIX + name, documentation, labels=[label] if label else [])
    return _filled(family, label, values, value)


def _counter(name: str, documentation: str, label: str = "", values: _Values | None = None, value: float = 0.0) -> Metric:
    """As `_gauge`; its name is shown with `_total` behind it."""
    family = CounterMetricFamily(_PREFIX + name, documentation, labels=[label] if label else [])
    return _filled(family, label, values, value)


def _filled(family: GaugeMetricFamily | CounterMetricFamily, label: str, values: _Values | None, value: float) -> Metric:
    for labels, sample in [((str(name),), each) for name, each in (values or {}).items()] if label else [((), value)]:
        family.add_metric(labels, float(sample))
    return family


def _histogram(name: str, documentation: str, histogram: Histogram) -> Metric:
    return histogram_family(_PREFIX + name, documentation, (), [((), histogram)])


def _latency(name: str, documentation: str, latency: Latency) -> Metric:
    histograms = [((lane.name.lower(), policy), histogram) for (lane, policy), histogram in latency.histograms.items()]
    return histogram_family(_PREFIX + name, documentation, ("lane", "policy"), histograms)


def _blocks(executors: Sequence[ExecutorStatus]) -> Metric:
    family = GaugeMetricFamily(
        f"{_PREFIX}kv_blocks", "KV blocks: held by sequences, cached for later ones, never used", labels=["executor", "state"]
    )
    for executor in executors:
        for state in ("held", "cached", "free"):
            family.add_metric((executor.name, state), getattr(executor.blocks, state))
    return family
