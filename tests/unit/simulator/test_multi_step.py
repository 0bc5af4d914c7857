"""Why the simulator plans single steps: in plans of several, the same requests run in the same steps, but for stop tokens."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenmill_scheduler.core.counters import Counters
from tokenmill_scheduler.core.scheduler import SchedulerConfig

from tests.simulation import oracle
from tests.simulation.world import World, description


def counted(requests: list[tuple[int, int]], slots: int, max_steps: int) -> tuple[Counters, int]:
    """Of requests by their prompt and output tokens; and how many plans there were. Executors cut plans short as they like."""
    config = SchedulerConfig(max_num_seqs=slots, max_num_batched_tokens=32)
    world = World(config, description(multi_step=True, num_blocks=400, max_num_batched_tokens=32))
    world.max_steps = max_steps
    endless = [seed for seed in range(1, 200) if oracle.eos_index(seed) is None]
    for seed, (prompt, output) in zip(endless, requests, strict=False):
        world.submit(seed, prompt, output)
    while world.turn():
        pass
    world.check_idle()
    return world.core.counters, len(world.plans)


@given(requests=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 40)), min_size=1, max_size=12), slots=st.integers(1, 5))
@settings(max_examples=15, deadline=None)
def test_plans_of_several_steps_are_the_same_steps(requests: list[tuple[int, int]], slots: int) -> None:
    (single, _), (several, _) = (counted(requests, slots, max_steps) for max_steps in (1, 8))
    assert several.steps == single.steps
    assert several.occupancy_sum == pytest.approx(single.occupancy_sum)
    assert several.output_tokens == single.output_tokens == sum(output for _, output in requests)


def test_and_there_are_fewer_plans_of_them() -> None:
    (_, single), (_, several) = (counted([(4, 33)] * 3, 3, max_steps) for max_steps in (1, 8))
    assert several < single / 2
