"""What a step costs: by the formula, by the vendors' figures, and by what was measured."""

from __future__ import annotations

import json
from importlib import resources

import numpy as np
import pytest
from tokenmill_simulator.cost import StepCost, StepLoad
from tokenmill_simulator.executor import step_load
from tokenmill_simulator.presets import PRESETS, preset

MEASURED = json.loads(resources.files("tokenmill_simulator").joinpath("measured.json").read_text(encoding="utf-8"))


def test_linear_layers_read_or_compute_and_attention_adds() -> None:
    cost = StepCost(step_s=1.0, weights_s=10.0, row_s=3.0, decode_s=2.0, kv_token_s=0.5, pair_s=0.25, chunk_s=7.0)
    assert cost.seconds(StepLoad(0, 1, 4, 0, 0)) == 1 + 10 + 2 + 2
    assert cost.seconds(StepLoad(4, 2, 4, 8, 2)) == 1 + (12 + 6) + 4 + 2 + 2 + 14


def test_an_a100_decodes_at_the_pace_of_its_memory() -> None:
    """8.03 billion weights of 2 bytes at 85 % of 2.039 TB/s are 9.27 ms; 64 sequences of 1,000 tokens read 8.4 GB more."""
    cost = preset("a100-8b").cost
    assert cost.seconds(StepLoad(0, 1, 1, 0, 0)) == pytest.approx(1e-3 + 9.27e-3, rel=1e-2)
    assert cost.seconds(StepLoad(0, 64, 64_000, 0, 0)) == pytest.approx(1e-3 + 9.27e-3 + 8.39e9 / 1.733e12, rel=1e-2)
    assert cost.seconds(StepLoad(2048, 0, 2048, 0, 1)) > 0.17


@pytest.mark.parametrize("way", MEASURED["step_ms"])
def test_the_fit_gives_back_what_was_measured(way: str) -> None:
    from tokenmill_simulator.presets import fit_cpu

    cost, steps = fit_cpu(MEASURED["step_ms"][way], 0.0), MEASURED["step_ms"][way]
    for sequences, context in ((1, 128), (8, 128), (32, 128), (32, 512)):
        load = StepLoad(0, sequences, sequences * context, 0, 0)
        assert 1e3 * cost.seconds(load) == pytest.approx(steps[f"{sequences} × {context}"])
    chunk = step_load(np.array([512]), np.array([512]))
    assert 1e3 * cost.seconds(chunk) == pytest.approx(steps["512 after 512"])
    assert min(cost.weights_s, cost.row_s, cost.decode_s, cost.kv_token_s, cost.pair_s) > 0


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_sound(name: str) -> None:
    machine = preset(name)
    costs = (machine.cost.step_s, machine.cost.weights_s, machine.cost.row_s, machine.cost.kv_token_s)
    assert min(costs) > 0
    assert (machine.service.client_s > 0) == name.startswith("cpu-"), "of computed ones nobody has measured the service"
    assert machine.kv_tokens > machine.max_num_batched_tokens >= machine.max_num_seqs
    assert machine.about
