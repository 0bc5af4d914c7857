"""The hit rates of `benchmarks.mooncake` on a trace small enough to count by hand, and against one another."""

from __future__ import annotations

import random

from tokenmill_workloads.arrivals import Arrival

from benchmarks.mooncake import BLOCK_SIZE, best_possible, replay


def arrival(*hash_ids: int) -> Arrival:
    """Of full blocks and one token more."""
    return Arrival(0.0, len(hash_ids) * BLOCK_SIZE + 1, 1, hash_ids)


def conversations(turns: int) -> list[Arrival]:
    """Eight that take turns at random, each a block longer at every turn."""
    rng = random.Random(1)
    lengths = dict.fromkeys(range(8), 1)
    trace = []
    for _ in range(turns):
        who = rng.randrange(8)
        trace.append(arrival(0, *(100 * who + place + 1 for place in range(lengths[who]))))
        lengths[who] += 1
    return trace


def test_the_best_possible_finds_all_that_came_before_in_a_chain() -> None:
    best = best_possible([arrival(0, 1, 2), arrival(0, 1, 3), arrival(9, 1)])
    assert (best.prompt, best.device) == (8 * BLOCK_SIZE + 3, 2 * BLOCK_SIZE)


def test_a_pool_that_never_evicts_is_as_good_as_possible_and_a_small_one_is_not_unless_host_memory_helps() -> None:
    trace = conversations(80)
    best = best_possible(trace)
    assert replay(trace, 1000, 0) == best
    alone, helped, whole = replay(trace, 20, 0), replay(trace, 20, 20), replay(trace, 20, 1000)
    assert alone.rate < helped.rate < whole.rate == best.rate
    assert alone.host == 0 < helped.host < whole.host
