"""What batching modes and policies do to loads, by simulation: the production core, model executors, a virtual clock.

    python -m benchmarks.policies azure_llm_2023_conversation.csv.gz mooncake_conversation.jsonl.gz:2000 [--preset NAME]

Static against continuous batching on the burst workload, with equal slots and with half of them. Then each policy of the core on
each trace, or on its first so many requests, at shares of capacity, which is measured by saturating the same machine. What traces
lack is drawn: lanes, tenants, priorities and deadlines. Requests are refused at submit as the service does. Writes its tables to
benchmarks/results/.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from tokenmill_scheduler.core.backlog import QueueLimits
from tokenmill_scheduler.core.policy import POLICIES
from tokenmill_simulator.compare import Machines, Run, candidate, machines, run
from tokenmill_simulator.cost import StepLoad
from tokenmill_simulator.entrance import Admittance
from tokenmill_simulator.figures import Target
from tokenmill_simulator.presets import Preset, preset
from tokenmill_simulator.requests import Mix, SimulatedRequest, mixed
from tokenmill_simulator.simulation import EVERYBODY
from tokenmill_workloads import Arrival, at_rate, burst, read_trace

_RESULTS = Path(__file__).parent / "results"
_BAR = 1.6
_SHARES = (0.7, 0.95, 1.3)
_CANDIDATES = (*POLICIES, "fcfs+fair_share=yes", "static")
_MIX = Mix(lanes=(20, 60, 20), tenants=4, priorities=(0, 0, 0, 10), deadlines_s=(60.0, 300.0, 1800.0))
# Served well: a token every ITL_S on average, and the first one within so much, or so many times what the mean prompt takes alone.
_ITL_S = 0.2
_TTFT_S, _TTFT_TIMES = 2.0, 5.0
_NO_TARGET = Target()
_AS_SERVED = Admittance(QueueLimits())
_SEEDS = range(1, 61)
_CLAIM = """\
“40–60 % less time, 80–150 % more tokens/s” is what is often claimed for continuous batching. With equal slots, prefill paid for and
a step with a fixed cost it becomes what the table says: {less:.0%} less time and {more:.0%} more tokens/s for the burst of seed 42,
and a median of {median:.2f}× over {seeds} other bursts ({low:.2f}–{high:.2f}×). A decode step of this machine takes nearly the same
time with one sequence as with eight, because reading the weights is most of it; so what counts is the number of steps: the sum of
each batch's longest output, against one stream that refills its slots. The gain ends where the queue does: the last requests of a
burst run in ever emptier steps under both, and 20 requests are only two and a half times the slots. The claimed figures appear when
static batching has half the slots: {half_less:.0%} less time and {half_more:.0%} more tokens/s. More slots for less padding is a
real gain of paged KV, but it is another one."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=_part, nargs="*", metavar="TRACE[:COUNT]", help="whole, or its first COUNT requests")
    parser.add_argument("--preset", default="a100-8b")
    options = parser.parse_args()
    started_s = time.process_time()
    chosen = preset(options.preset)
    parts = [_bursts(preset(name)) for name in dict.fromkeys((options.preset, "cpu-smollm2-bf16"))]
    file, text = _RESULTS / f"{datetime.now(UTC):%Y-%m-%d}-policies.md", ""
    for trace in (None, *options.traces):
        # After each, for a run of minutes may be cut short.
        parts += [] if trace is None else [_policies(trace, chosen)]
        text = "\n".join([_heading(chosen, time.process_time() - started_s), *parts])
        file.write_text(text, encoding="utf-8")
    print(text)


@dataclass(frozen=True, slots=True)
class _Part:
    """The first `count` requests of a trace; None: all."""

    path: Path
    count: int | None


def _part(word: str) -> _Part:
    path, colon, count = word.rpartition(":")
    return _Part(Path(path), int(count)) if colon and count.isdigit() else _Part(Path(word), None)


def _heading(chosen: Preset, cpu_s: float) -> str:
    return f"""\
# Batching modes and policies, simulated, {datetime.now(UTC):%Y-%m-%d}

`python -m benchmarks.policies TRACE…`, {cpu_s:.0f} s of CPU. The scheduler's core against model executors under a virtual clock.
{chosen.name}: {chosen.about};
{chosen.max_num_seqs} slots, {chosen.max_num_batched_tokens} tokens a step where nothing else is said.
"""


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


# ---- the burst -----------------------------------------------------------------------------------------------------------------


def _bursts(chosen: Preset) -> str:
    requests = mixed(burst())
    on = machines(chosen, requests)
    runs = {name: _run(name, requests, on) for name in ("static:8", "continuous:8", "static:4")}
    columns = ("burst of 20", "wall time", "output tokens/s", "occupancy", "mean latency of the shortest third")
    table = _table(columns, [_burst_row(name, run) for name, run in runs.items()])
    equal, half = (runs[name].figures.wall_s / runs["continuous:8"].figures.wall_s for name in ("static:8", "static:4"))
    ratios = f"Continuous over static: {equal:.2f}× at equal slots, {half:.2f}× against half of them."
    text = f"## The burst on {chosen.name}\n\n{table}\n{ratios}"
    if chosen.name == "cpu-smollm2-bf16":
        return f"{text}\n"
    return f"{text} Bar at equal slots: ≥ {_BAR}×; {'met' if equal >= _BAR else 'missed'}.\n\n{_claim(chosen, equal, half)}\n"


def _burst_row(name: str, run: Run) -> tuple[str, ...]:
    figures = run.figures
    wall, rate, occupancy = f"{figures.wall_s:.2f} s", f"{figures.output_tokens_per_s:.0f}", f"{figures.occupancy:.0%}"
    return name, wall, rate, occupancy, f"{_short_latency_s(run):.2f} s"


def _claim(chosen: Preset, equal: float, half: float) -> str:
    others = [_ratio(chosen, seed) for seed in _SEEDS]
    return _CLAIM.format(
        less=1 - 1 / equal,
        more=equal - 1,
        half_less=1 - 1 / half,
        half_more=half - 1,
        median=np.median(others),
        low=min(others),
        high=max(others),
        seeds=len(others),
    )


def _ratio(chosen: Preset, seed: int) -> float:
    requests = mixed(burst(seed=seed))
    on = machines(chosen, requests)
    static, continuous = (_run(name, requests, on).figures.wall_s for name in ("static:8", "continuous:8"))
    return static / continuous


def _short_latency_s(run: Run) -> float:
    measures = run.measures
    short = np.argsort(measures.tokens, kind="stable")[: max(1, len(measures.tokens) // 3)]
    return float((measures.ended_s - measures.arrival_s)[short].mean())


def _run(
    name: str, requests: list[SimulatedRequest], on: Machines, target: Target = _NO_TARGET, admittance: Admittance = EVERYBODY
) -> Run:
    return run(name, candidate(name, on.config()), requests, on, target, admittance=admittance)


# ---- policies on traces --------------------------------------------------------------------------------------------------------


def _policies(part: _Part, chosen: Preset) -> str:
    started_s = time.process_time()
    recorded = read_trace(part.path)
    arrivals = recorded[: part.count]
    on = machines(chosen, mixed(arrivals))
    capacity, target = _capacity(arrivals, on), _target(arrivals, on)
    columns = (
        "load and policy", "done/s", "output tokens/s", "served well", "not done", "refused", "first token p50", "p99",
        "real-time p99", "inter-token p99", "KV mean", "prefix hits", "preemptions", "queue most",
    )  # fmt: skip
    rows = []
    for share in _SHARES:
        requests = mixed(at_rate(arrivals, share * capacity), _MIX)
        for name in [name for name in _CANDIDATES if name != "lpm" or requests[0].shares_prefixes]:
            print(f"{part.path.name} {share:.0%} {name}", file=sys.stderr)
            rows.append(_row(f"{share:.0%} {name}", _run(name, requests, on, target, _AS_SERVED)))
    return f"""\
## {part.path.name}, {_share(len(arrivals), len(recorded))}

Capacity {capacity:.2f} requests/s, measured with all of them waiting; {_rate(arrivals):.2f} were recorded. Drawn: lanes 20/60/20 %,
{_MIX.tenants} tenants, a quarter with priority, deadlines of {", ".join(f"{s:g}" for s in _MIX.deadlines_s)} s. Clients ask for as
many tokens as are made, which is the best case of sjf. Where no prompts are known to begin alike, lpm is fcfs and left out. Served
well: first token within {target.ttft_s:.1f} s, then one every {1e3 * target.itl_s:g} ms on average.

{_table(columns, rows)}
{time.process_time() - started_s:.0f} s of CPU.
"""


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
    saturated = _run("fcfs", mixed([replace(arrival, at_s=0.0) for arrival in arrivals]), on)
    ended_s = np.sort(saturated.measures.ended_s)
    low, high = len(ended_s) // 10, 9 * len(ended_s) // 10
    return float((high - low) / (ended_s[high] - ended_s[low]))


def _rate(arrivals: Sequence[Arrival]) -> float:
    return (len(arrivals) - 1) / arrivals[-1].at_s


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


if __name__ == "__main__":
    main()
