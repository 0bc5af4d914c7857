"""Policies on recorded arrivals at shares of capacity, which is measured by saturating the same machines.

What traces lack is drawn: lanes, tenants, priorities and deadlines. Requests are refused at submit as the service does. A trace
that says which prompts begin alike runs on machines that its long prompts call for, with a second tier of the prefix cache in host
memory; a further table has arrival order beside longest prefix match, with and without that tier, and nothing drawn.
Must not know: files of results.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from tokenmill_scheduler.core.backlog import QueueLimits
from tokenmill_scheduler.core.policy import POLICIES
from tokenmill_simulator.compare import Machines, Run, candidate, machines, run
from tokenmill_simulator.cost import StepLoad
from tokenmill_simulator.entrance import Admittance
from tokenmill_simulator.figures import Target
from tokenmill_simulator.presets import preset
from tokenmill_simulator.requests import Mix, SimulatedRequest, mixed
from tokenmill_simulator.simulation import EVERYBODY
from tokenmill_workloads import Arrival, at_rate, read_trace

from benchmarks.policies.table import table

_SHARES = (0.7, 0.95, 1.3)
_FCFS, _LPM = "fcfs", "lpm"
_CANDIDATES = (*POLICIES, "fcfs+fair_share=yes", "static")
_MIX = Mix(lanes=(20, 60, 20), tenants=4, priorities=(0, 0, 0, 10), deadlines_s=(60.0, 300.0, 1800.0))
# Served well: a token every ITL_S on average, and the first one within so much, or so many times what the mean prompt takes alone.
_ITL_S = 0.2
_TTFT_S, _TTFT_TIMES = 2.0, 5.0
_NO_TARGET = Target()
_AS_SERVED = Admittance(QueueLimits())


@dataclass(frozen=True, slots=True)
class _Fleet:
    """`host_gib`: of each machine, for blocks that its prefix cache has no room for."""

    preset: str
    count: int = 1
    host_gib: float = 0.0

    def __str__(self) -> str:
        return f"{self.count} × {self.preset}" + (f" with {self.host_gib:g} GiB of host memory each" if self.host_gib else "")

    def machines(self, arrivals: Sequence[Arrival]) -> Machines:
        return machines(preset(self.preset), mixed(arrivals), self.count, host_gib=self.host_gib)


PLAIN = _Fleet("a100-8b")
# Three prompts of 12,000 tokens a second are what three of these can do; a server of eight has 2 TB, which is 200 GiB for each.
CACHING = _Fleet("h100-8b", count=3, host_gib=200.0)


@dataclass(frozen=True, slots=True)
class _Load:
    """Arrivals, the machines they come to, those machines' capacity in requests/s, and what is well served on them."""

    name: str
    arrivals: Sequence[Arrival]
    on: Machines
    capacity: float
    target: Target

    def run(self, label: str, name: str, requests: list[SimulatedRequest], on: Machines) -> Run:
        print(f"{self.name} {label} {name}", file=sys.stderr)
        return _run(name, requests, on, self.target, _AS_SERVED)


def trace(path: Path, count: int | None) -> str:
    """Of its first `count` requests; None: all."""
    started_s = time.process_time()
    recorded = read_trace(path)
    arrivals = recorded[:count]
    shares_prefixes = mixed(arrivals[:1])[0].shares_prefixes
    fleet = CACHING if shares_prefixes else PLAIN
    on = fleet.machines(arrivals)
    load = _Load(path.name, arrivals, on, _capacity(arrivals, on), _target(arrivals, on))
    return f"""\
## {load.name}, {_share(len(arrivals), len(recorded))}

On {fleet}. Capacity {load.capacity:.2f} requests/s, measured with all of them
waiting; {_rate(arrivals):.2f} were recorded. Clients ask for as many tokens as are made, which is the best case of sjf.
Served well: first token within {load.target.ttft_s:.1f} s, then one every {1e3 * load.target.itl_s:g} ms on average.

{_policies(load)}{_orders(load) if shares_prefixes else ""}
{time.process_time() - started_s:.0f} s of CPU.
"""


def _policies(load: _Load) -> str:
    columns = (
        "load and policy", "done/s", "output tokens/s", "served well", "not done", "refused", "first token p50", "p99",
        "real-time p99", "inter-token p99", "KV mean", "prefix hits", "preemptions", "queue most",
    )  # fmt: skip
    rows = []
    for share in _SHARES:
        requests = mixed(at_rate(load.arrivals, share * load.capacity), _MIX)
        rows += [
            _row(f"{share:.0%} {name}", load.run(f"{share:.0%}", name, requests, load.on))
            for name in _CANDIDATES
            if name != _LPM or requests[0].shares_prefixes
        ]
    deadlines = ", ".join(f"{s:g}" for s in _MIX.deadlines_s)
    return f"""\
Drawn: lanes 20/60/20 %, {_MIX.tenants} tenants, a quarter with priority, deadlines of {deadlines} s. Where no prompts are known to
begin alike, lpm is fcfs and left out.

{table(columns, rows)}"""


def _orders(load: _Load) -> str:
    """What longest prefix match gains, and with how much memory, where requests wait."""
    columns = (
        "load, host memory, order", "done/s", "not done", "prefix hits", "computed a prompt", "first token mean", "p50", "p99",
        "inter-token p99", "served well", "queue mean",
    )  # fmt: skip
    rows = []
    for share in _SHARES[1:]:
        requests = mixed(at_rate(load.arrivals, share * load.capacity))
        for host_gib in (0.0, CACHING.host_gib):
            on = replace(CACHING, host_gib=host_gib).machines(load.arrivals)
            label = f"{share:.0%}, {f'{host_gib:g} GiB' if host_gib else 'none'},"
            rows += [_order_row(f"{label} {name}", load.run(label, name, requests, on)) for name in (_FCFS, _LPM)]
    return f"""
Nothing drawn: one lane, one tenant, no deadlines. A cache that never forgets would hit {_best_hits(load.arrivals):.1%}.

{table(columns, rows)}"""


def _best_hits(arrivals: Sequence[Arrival]) -> float:
    """Of all prompt tokens, were every block kept that ever was, for every machine."""
    seen: set[int] = set()
    hits = 0
    for arrival in arrivals:
        blocks = arrival.hash_ids[: (arrival.prompt_tokens - 1) // arrival.hash_block_tokens]
        hits += arrival.hash_block_tokens * next((place for place, block in enumerate(blocks) if block not in seen), len(blocks))
        seen.update(blocks)
    return hits / sum(arrival.prompt_tokens for arrival in arrivals)


def _share(taken: int, recorded: int) -> str:
    if taken == recorded:
        return f"all {taken:,} requests"
    return f"the first {taken:,} of {recorded:,} requests ({taken / recorded:.0%})"


def _target(arrivals: Sequence[Arrival], on: Machines) -> Target:
    tokens = round(np.mean([arrival.prompt_tokens for arrival in arrivals]))
    alone_s = on.cost.seconds(StepLoad(tokens, 0, tokens, tokens * tokens // 2, 1))
    return Target(max(_TTFT_S, _TTFT_TIMES * alone_s), _ITL_S)


def _capacity(arrivals: Sequence[Arrival], on: Machines) -> float:
    """Requests done a second while there are always others waiting: the first and the last tenth of them are left out."""
    saturated = _run(_FCFS, mixed([replace(arrival, at_s=0.0) for arrival in arrivals]), on, _NO_TARGET, EVERYBODY)
    ended_s = np.sort(saturated.measures.ended_s)
    low, high = len(ended_s) // 10, 9 * len(ended_s) // 10
    return float((high - low) / (ended_s[high] - ended_s[low]))


def _rate(arrivals: Sequence[Arrival]) -> float:
    return (len(arrivals) - 1) / arrivals[-1].at_s


def _order_row(name: str, run: Run) -> tuple[str, ...]:
    figures = run.figures
    first = figures.time_to_first_token_s
    return (
        name,
        f"{figures.requests_per_s:.2f}",
        f"{figures.not_done / figures.requests:.1%}",
        f"{figures.prefix_hit_share:.1%}",
        f"{(1 - figures.prefix_hit_share) * figures.prompt_tokens / figures.requests:,.0f}",
        f"{first.mean:.2f} s",
        f"{first.p50:.2f} s",
        f"{first.p99:.1f} s",
        f"{1e3 * figures.inter_token_s.p99:.0f} ms",
        f"{figures.goodput_share:.0%}",
        f"{figures.queue_mean:.1f}",
    )


def _row(name: str, run: Run) -> tuple[str, ...]:
    figures = run.figures
    return (
        name,
        f"{figures.requests_per_s:.2f}",
        f"{figures.output_tokens_per_s:.0f}",
        f"{figures.goodput_share:.0%}",
        f"{figures.not_done / figures.requests:.1%}",
        f"{figures.refused / figures.requests:.1%}",
        f"{figures.time_to_first_token_s.p50:.2f} s",
        f"{figures.time_to_first_token_s.p99:.1f} s",
        f"{figures.lanes['real_time'].p99:.1f} s",
        f"{1e3 * figures.inter_token_s.p99:.0f} ms",
        f"{figures.kv_usage_mean:.0%}",
        f"{figures.prefix_hit_share:.0%}",
        f"{figures.preemptions}",
        f"{figures.queue_max}",
    )


def _run(name: str, requests: list[SimulatedRequest], on: Machines, target: Target, admittance: Admittance) -> Run:
    return run(name, candidate(name, on.config()), requests, on, target, admittance=admittance)
