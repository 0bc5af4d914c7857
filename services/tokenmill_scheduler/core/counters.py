"""Figures about the core: counters since it began and gauges as they stand. Records only."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

from tokenmill_scheduler.core.plans import Blocks


class Preemption(StrEnum):
    """What a running request is put back into the queue for."""

    OUT_OF_BLOCKS = "out_of_blocks"
    # The executor had no block although the forecast said there was one.
    NO_BLOCKS = "no_blocks"
    DISPLACED = "displaced"
    EXECUTOR_LOST = "executor_lost"
    EXECUTOR_DRAINED = "executor_drained"


@dataclass(slots=True)
class Counters:
    """Counted since the scheduler began.

    - preemptions: running requests put back into the queue, whether for blocks, priority, or an executor lost or drained;
      preempted: the same by what for.
    - steps: plans answered. occupancy_sum: over them, sequences advanced / slots; divided by steps it is the mean batch occupancy.
    - prompt_tokens: of requests at their first admission. output_tokens: kept, overshoot not among them.
    - stale_results: results, and sequences' parts of results, that answered for something no longer wanted.
    - prefix_cache_queries: known tokens of sequences at their first step, where prefixes are cached. prefix_cache_hits: those of
      them that were there.
    - recomputed_tokens: that had been computed before a preemption and, at the first step after it, were to be computed again.
    - overload_changes: from one stage of overload to the next, up or down.
    - no_blocks: sequences an executor had no block for although the forecast said there was one.
    """

    preemptions: int = 0
    preempted: Counter[Preemption] = field(default_factory=Counter)
    steps: int = 0
    occupancy_sum: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    stale_results: int = 0
    no_blocks: int = 0
    recomputed_tokens: int = 0
    overload_changes: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0


@dataclass(frozen=True, slots=True)
class ExecutorView:
    """What the core knows of one executor. `plans_out` are unanswered; `free_blocks` is the forecast, never above what is free."""

    name: str
    model: str
    joined: bool
    epoch: int
    block_size: int
    blocks: Blocks
    free_blocks: int
    running: int
    steps: int
    plans_out: int
    max_num_seqs: int
    max_num_batched_tokens: int
    drained: bool
