"""Small loads and machines for the simulator's tests."""

from __future__ import annotations

from tokenmill_scheduler.core.plans import ExecutorDescription
from tokenmill_simulator.compare import MODEL, Machines
from tokenmill_simulator.cost import StepCost
from tokenmill_simulator.requests import SimulatedRequest, mixed
from tokenmill_workloads import Arrival, burst

# A millisecond a step, a tenth of one for each token.
COST = StepCost(step_s=1e-3, weights_s=0.0, row_s=1e-4, decode_s=0.0, kv_token_s=0.0)


def small_machines(
    *, count: int = 1, num_blocks: int = 64, block_size: int = 4, seqs: int = 4, tokens: int = 32, caching: bool = False
) -> Machines:
    version = "tests" if caching else None
    description = ExecutorDescription(
        "executor", MODEL, block_size, num_blocks, 4096, seqs, tokens, caches_prefixes=caching, cache_version=version
    )
    return Machines(COST, description, count)


def burst_of(count: int = 20, seed: int = 42) -> list[SimulatedRequest]:
    return mixed(burst(count, seed=seed))


def together(*lengths: tuple[int, int]) -> list[SimulatedRequest]:
    """Requests that come at once, by tokens of prompt and of output."""
    return mixed(Arrival(0.0, prompt, output) for prompt, output in lengths)
