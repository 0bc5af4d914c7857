"""Figures about the core: counters since it began and gauges as they stand. Records only."""

from __future__ import annotations

from dataclasses import dataclass

from tokenmill_scheduler.core.records import Blocks


@dataclass(slots=True)
class Counters:
    """Counted since the scheduler began.

    - preemptions: running requests put back into the queue, whether for blocks, priority, or an executor lost or drained.
    - steps: plans answered. occupancy_sum: over them, sequences advanced / slots; divided by steps it is the mean batch occupancy.
    - prompt_tokens: of requests at their first admission. output_tokens: kept, overshoot not among them.
    - stale_results: results, and sequences' parts of results, that answered for something no longer wanted.
    - prefix_cache_queries: known tokens of sequences at their first step, where prefixes are cached. prefix_cache_hits: those of
      them that were there.
    - no_blocks: sequences an executor had no block for although the forecast said there was one.
    """

    preemptions: int = 0
    steps: int = 0
    occupancy_sum: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    stale_results: int = 0
    no_blocks: int = 0
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
