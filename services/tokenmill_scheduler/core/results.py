"""Reads one result: tokens to the requests they are for, ends, faults, blocks. Must not know: policies, how plans are made.

Effects in order: the tokens of all sequences, then each request's transition in the plan's order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import add

from tokenmill_scheduler.core import quarantine
from tokenmill_scheduler.core.counters import Preemption
from tokenmill_scheduler.core.effects import TokensGenerated
from tokenmill_scheduler.core.events import TextStop
from tokenmill_scheduler.core.executor import ExecutorState, PlanOut
from tokenmill_scheduler.core.live import INTERNAL, RESOURCE_EXHAUSTED, Ending, LiveRequest
from tokenmill_scheduler.core.plans import Fault, Result, SequenceFault, SequenceFinish, TokenLogprobs
from tokenmill_scheduler.core.request import RUNNING, FinishReason, State
from tokenmill_scheduler.core.roster import Roster
from tokenmill_scheduler.core.sequence import Sequence

_STOP = Ending(State.DONE, FinishReason.STOP)
_LENGTH = Ending(State.DONE, FinishReason.LENGTH)
_NO_BLOCKS = "the executor had no free KV block"


def apply_result(
    roster: Roster, executor: ExecutorState, result: Result, text_stops: Mapping[int, TextStop], max_no_blocks: int, now_s: float
) -> None:
    """Applies the answer to the oldest plan out; anything else is stale: dropped and counted.

    A request fails at the `max_no_blocks`th answer NO_BLOCKS in a row.
    """
    if not _answers_oldest(executor, result):
        roster.counters.stale_results += 1
        return
    out = executor.plans_out.popleft()
    _count_steps(roster, executor, len(out.sequences), result.num_steps)
    executor.blocks = result.blocks
    executor.forecast.available = result.blocks.available
    if result.dropped or result.stored:
        executor.mirror.apply(result.dropped, result.stored)
        executor.coming.arrived(result.stored)
    _Reading(roster, executor, _in_plan_order(out, result), text_stops, max_no_blocks, now_s).read(out)
    quarantine.acquit(executor)
    for sequence_id in executor.settle_leaving(out.plan.release):
        roster.quotas.freed(sequence_id, now_s)


def _answers_oldest(executor: ExecutorState, result: Result) -> bool:
    """Results come in the order of plans; another epoch or another plan is nobody's answer."""
    plans_out = executor.plans_out
    return bool(plans_out) and result.epoch == executor.epoch and result.plan_id == plans_out[0].plan.plan_id


def _count_steps(roster: Roster, executor: ExecutorState, num_sequences: int, num_steps: int) -> None:
    executor.steps += num_steps
    roster.counters.steps += num_steps
    roster.counters.occupancy_sum += num_steps * num_sequences / executor.max_num_seqs


@dataclass(frozen=True, slots=True)
class _Change:
    """What a sequence's row does to its request beyond tokens: it ends, loses its blocks, or begins to decode.

    `let_go`: the executor ended or dropped the sequence by itself; one ended for its text has to be released.
    """

    sequence: Sequence
    live: LiveRequest
    ending: Ending | None = None
    no_blocks: bool = False
    let_go: bool = False


class _Reading:
    """One result being read: columns of the TokensGenerated to come, and what has to change once it is told."""

    def __init__(
        self,
        roster: Roster,
        executor: ExecutorState,
        result: Result,
        text_stops: Mapping[int, TextStop],
        max_no_blocks: int,
        now_s: float,
    ) -> None:
        self._roster = roster
        self._executor = executor
        self._result = result
        self._text_stops = text_stops
        self._max_no_blocks = max_no_blocks
        self._now_s = now_s
        self._request_ids: list[str] = []
        self._first_indexes: list[int] = []
        self._counts: list[int] = []
        self._token_ids: list[int] = []
        self._logprobs: dict[str, tuple[TokenLogprobs, ...]] = {}
        self._changes: list[_Change] = []

    def read(self, out: PlanOut) -> None:
        self._read_columns(out)
        if self._token_ids:
            self._tell_tokens()
        for change in self._changes:
            self._carry_out(change)

    def _read_columns(self, out: PlanOut) -> None:
        """The hot loop: once for each sequence of each step, so it looks at the rare cases only where one can be."""
        result, forecast = self._result, self._executor.forecast
        exceptions = result.faults.keys() | self._text_stops.keys() if result.faults or self._text_stops else ()
        start = 0
        columns = zip(out.sequences, _advanced(result), result.num_sampled, result.finishes, strict=True)
        for row, (sequence, advanced, num_sampled, finish) in enumerate(columns):
            sequence.settle(advanced, num_sampled)
            if sequence.computed >= sequence.confirm_at:
                if sequence.held == 0:
                    self._count_lookup(row, sequence, sequence.known - num_sampled)
                forecast.confirm(sequence)
            first, start = start, start + num_sampled
            live = sequence.live
            if live is None:
                self._roster.counters.stale_results += num_sampled > 0
            elif finish or sequence.sequence_id in exceptions or result.logprobs:
                self._read_exception(row, sequence, live, first, num_sampled)
            elif num_sampled:
                self._keep(live, result.token_ids[first:start])
                if live.state is State.PREFILL:
                    self._changes.append(_Change(sequence, live))

    def _count_lookup(self, row: int, sequence: Sequence, known: int) -> None:
        """A sequence's first step, for which its `known` tokens were looked up."""
        cached = self._result.num_cached[row] if self._result.num_cached else 0
        if cached and sequence.first and sequence.live is not None:
            sequence.live.cached_tokens = cached
        if sequence.live is not None:
            self._roster.counters.recomputed_tokens += max(0, sequence.live.computed_before - cached)
        if self._executor.description.caches_prefixes:
            counters = self._roster.counters
            counters.prefix_cache_queries += known
            counters.prefix_cache_hits += cached

    def _read_exception(self, row: int, sequence: Sequence, live: LiveRequest, first: int, num_sampled: int) -> None:
        """A sequence that ends, is at fault, or comes with log probabilities."""
        stop = self._text_stops.get(sequence.sequence_id)
        fault = self._result.faults.get(sequence.sequence_id)
        kept = num_sampled if stop is None else min(stop.keep, num_sampled)
        if kept:
            self._keep(live, self._result.token_ids[first : first + kept])
            if row in self._result.logprobs:
                self._logprobs[live.request_id] = self._result.logprobs[row][:kept]
        finish = self._result.finishes[row]
        ending = _ending(finish, fault, stop)
        if ending is not None or fault is not None or (kept and live.state is State.PREFILL):
            let_go = fault is not None or finish != SequenceFinish.NONE
            self._changes.append(_Change(sequence, live, ending, fault is not None, let_go))

    def _keep(self, live: LiveRequest, token_ids: tuple[int, ...]) -> None:
        self._request_ids.append(live.request.request_id)
        self._first_indexes.append(len(live.output))
        self._counts.append(len(token_ids))
        self._token_ids += token_ids
        live.output += token_ids

    def _tell_tokens(self) -> None:
        self._roster.counters.output_tokens += len(self._token_ids)
        if self._roster.quotas.counts_tokens:
            for request_id, count in zip(self._request_ids, self._counts, strict=True):
                self._roster.quotas.spent(self._roster.requests[request_id].request.tenant, count, self._now_s)
        self._roster.effects.append(
            TokensGenerated(
                tuple(self._request_ids),
                tuple(self._first_indexes),
                tuple(self._counts),
                tuple(self._token_ids),
                self._now_s,
                self._logprobs,
            )
        )

    def _carry_out(self, change: _Change) -> None:
        live = change.live
        if change.ending is not None:
            self._roster.end(live, change.ending, self._now_s, executor_let_go=change.let_go)
        elif not change.no_blocks:
            self._roster.effects.append(live.move(State.DECODE, self._now_s, executor=self._executor.name))
        else:
            self._roster.counters.no_blocks += 1
            if live.state in RUNNING:
                self._try_again(change)

    def _try_again(self, change: _Change) -> None:
        """After NO_BLOCKS; but where the forecast is always wrong, trying brings nothing."""
        refusals = change.live.count_no_blocks()
        if refusals < self._max_no_blocks:
            self._roster.preempt(change.sequence, self._now_s, Preemption.NO_BLOCKS, _NO_BLOCKS)
        else:
            error = f"{_NO_BLOCKS}, {refusals} times in a row, though it had reported enough; it is not tried again"
            ending = Ending(State.FAILED, FinishReason.ERROR, "no blocks", error, RESOURCE_EXHAUSTED)
            self._roster.end(change.live, ending, self._now_s)


def _ending(finish: int, fault: Fault | None, stop: TextStop | None) -> Ending | None:
    """How a sequence's request ends by this result; None if it goes on. NO_BLOCKS preempts, it does not end."""
    if stop is not None:
        return _STOP
    if fault is not None and fault.fault is SequenceFault.TOO_LONG:
        return Ending(State.FAILED, FinishReason.ERROR, "too long", fault.detail, RESOURCE_EXHAUSTED)
    if fault is not None and fault.fault is SequenceFault.ERROR:
        return Ending(State.FAILED, FinishReason.ERROR, "executor error", fault.detail, INTERNAL)
    if finish == SequenceFinish.STOP:
        return _STOP
    return _LENGTH if finish == SequenceFinish.LENGTH else None


def _advanced(result: Result) -> tuple[int, ...]:
    """By how many tokens each sequence went on, computed or cached."""
    return tuple(map(add, result.num_computed, result.num_cached)) if result.num_cached else result.num_computed


def _in_plan_order(out: PlanOut, result: Result) -> Result:
    """The result with exactly the plan's rows: the same object when the executor kept the protocol.

    Rows the plan does not have are dropped; a row that is missing counts as not advanced, and is planned again.
    """
    if result.sequence_ids == out.plan.advance_sequence_ids:
        return result
    starts = [0, *accumulate(result.num_sampled)]
    rows = {sequence_id: row for row, sequence_id in enumerate(result.sequence_ids)}
    found = [rows.get(sequence_id) for sequence_id in out.plan.advance_sequence_ids]
    return replace(
        result,
        sequence_ids=out.plan.advance_sequence_ids,
        num_computed=tuple([0 if row is None else result.num_computed[row] for row in found]),
        num_sampled=tuple([0 if row is None else result.num_sampled[row] for row in found]),
        token_ids=tuple([token for row in found if row is not None for token in result.token_ids[starts[row] : starts[row + 1]]]),
        finishes=tuple([0 if row is None else result.finishes[row] for row in found]),
        logprobs={index: result.logprobs[row] for index, row in enumerate(found) if row is not None and row in result.logprobs},
        num_cached=tuple([0 if row is None else result.num_cached[row] for row in found]) if result.num_cached else (),
    )
