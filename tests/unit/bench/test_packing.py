"""The fewest steps of a burst (`benchmarks.policies.packing`), counted by hand, and what the scheduler takes."""

from __future__ import annotations

import pytest
from tokenmill_simulator.compare import candidate, machines, run
from tokenmill_simulator.figures import Target
from tokenmill_simulator.presets import preset
from tokenmill_simulator.requests import mixed
from tokenmill_workloads import burst

from benchmarks.policies.packing import steps_in_order, steps_packed


def test_in_order_each_begins_as_soon_as_a_slot_is_free() -> None:
    # 3 and 1 begin; 2 follows the 1, 4 whichever ends at step 3.
    assert steps_in_order([3, 1, 2, 4], 2) == 7
    assert steps_in_order([4, 3, 2, 1], 2) == 5


def test_packed_is_what_no_order_beats() -> None:
    assert steps_packed([3, 1, 2, 4], 2) == 5
    assert steps_packed([9, 1, 1], 2) == 9
    assert steps_packed([2, 2, 2], 2) == 3


@pytest.mark.parametrize("seed", [42, 1, 2, 3])
def test_continuous_batching_leaves_no_slot_empty_while_a_request_waits(seed: int) -> None:
    arrivals = burst(seed=seed)
    requests = mixed(arrivals)
    on = machines(preset("a100-8b"), requests)
    figures = run("continuous:8", candidate("continuous:8", on.config()), requests, on, Target()).figures
    assert figures.steps == steps_in_order([arrival.output_tokens for arrival in arrivals], 8)
