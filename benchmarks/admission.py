"""The three modes of admission compared: what they make of one pool of KV blocks, on the simulator, under its virtual clock.

    python -m benchmarks.admission [--requests 2000] [--rate 12] [--kv-tokens 60000] [--preset a100-8b] [--output FILE]

The production core plans; the preset's cost model says how long its steps take. Requests arrive at random (Poisson) with prompts
and outputs of log-normal lengths, once from clients that ask for exactly what they need (careful), once from such as always ask for
2,048 tokens (careless), which is what the modes differ by. The pool is small enough for blocks to be what is short. Prints a table
and writes it as markdown.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass, replace
from pathlib import Path

from tokenmill_scheduler.core.admission import ADMISSION_MODES
from tokenmill_scheduler.core.counters import Preemption
from tokenmill_simulator.compare import machines
from tokenmill_simulator.figures import Figures, Target, summarise
from tokenmill_simulator.measures import Measures
from tokenmill_simulator.presets import preset
from tokenmill_simulator.requests import SimulatedRequest
from tokenmill_simulator.simulation import Simulation
from tokenmill_workloads import Arrival

from benchmarks.tables import table_path, today

_CARELESS_MAX_TOKENS = 2048
_TENANTS = ("short", "long")
# Median tokens of prompt and output, by tenant.
_MEDIANS = {"short": (300, 80), "long": (600, 400)}
_SIGMA = 0.7


@dataclass(frozen=True, slots=True)
class Row:
    clients: str
    mode: str
    figures: Figures
    preemptions: int
    recomputed: int


def workload(requests: int, rate: float, max_tokens: int | None, seed: int = 7) -> list[SimulatedRequest]:
    """Two tenants, one of short and one of long outputs, half of the requests each. The same seed gives the same requests."""
    draw, at_s, load = random.Random(seed), 0.0, []
    for number in range(requests):
        at_s += draw.expovariate(rate)
        tenant = _TENANTS[number % 2]
        prompt, output = (max(1, min(int(draw.lognormvariate(0, _SIGMA) * median), 2_000)) for median in _MEDIANS[tenant])
        load.append(SimulatedRequest(Arrival(at_s, prompt, output), tenant=tenant, max_tokens=max_tokens))
    return load


def run(clients: str, mode: str, load: list[SimulatedRequest], options: argparse.Namespace) -> Row:
    on = machines(replace(preset(options.preset), kv_tokens=options.kv_tokens), load)
    config = replace(on.config(), admission=mode)
    measures = Measures(load)
    simulation = Simulation(config, load, on.executors, on.cost, measures)
    simulation.run()
    counters = simulation.core.counters
    figures = summarise(measures, counters, config.max_num_seqs, on.count, Target())
    return Row(clients, mode, figures, counters.preempted[Preemption.OUT_OF_BLOCKS], counters.recomputed_tokens)


def table(rows: list[Row], options: argparse.Namespace) -> str:
    lines = [
        f"# Modes of admission, {today()}",
        "",
        f"Simulated {options.preset}, a pool of {options.kv_tokens:,} tokens; {options.requests:,} requests at {options.rate:g} a "
        f"second, half of a tenant with short outputs and half of one with long ones. Careless clients ask for "
        f"{_CARELESS_MAX_TOKENS:,} tokens whatever they need. One run each, virtual time.",
        "",
        "| clients | admission | output tokens/s | requests/s | preempted for blocks | recomputed tokens | of all computed "
        "| KV held, mean | batch, mean | first token p50 / p99 s | between tokens p99 ms |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    return "\n".join(lines + [_line(row) for row in rows]) + "\n"


def _line(row: Row) -> str:
    figures, ttft = row.figures, row.figures.time_to_first_token_s
    computed = figures.prompt_tokens + figures.output_tokens + row.recomputed
    cells = (
        row.clients,
        row.mode,
        f"{figures.output_tokens_per_s:,.0f}",
        f"{figures.requests_per_s:.2f}",
        f"{row.preemptions:,}",
        f"{row.recomputed:,}",
        f"{row.recomputed / computed:.1%}",
        f"{figures.kv_usage_mean:.1%}",
        f"{figures.occupancy:.1%}",
        f"{ttft.p50:.2f} / {ttft.p99:.2f}",
        f"{figures.inter_token_s.p99 * 1000:.1f}",
    )
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2_000)
    parser.add_argument("--rate", type=float, default=12.0, help="arrivals a second")
    parser.add_argument("--kv-tokens", type=int, default=60_000, help="tokens that the pool holds")
    parser.add_argument("--preset", default="a100-8b")
    parser.add_argument("--output", type=Path, default=table_path("admission"))
    options = parser.parse_args()
    rows = []
    for clients, max_tokens in (("careful", None), ("careless", _CARELESS_MAX_TOKENS)):
        load = workload(options.requests, options.rate, max_tokens)
        rows += [run(clients, mode, load, options) for mode in ADMISSION_MODES]
    text = table(rows, options)
    print(text)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(text)


if __name__ == "__main__":
    main()
