"""A shared prefix with the prefix cache on and off: 16 requests that begin with the same 768 tokens, through the engine.

    python -m benchmarks.prefix [--model PATH] [--requests 16] [--prefix 768] [--repeat 3] [executor flags ...]

Without --model it takes SmolLM2-135M-Instruct from the model cache, in bfloat16 on the C++ kernels where they run. One request with
the prefix has been served before; then all others come at once, each with 16 tokens and 32 output tokens of its own, and a step
takes at most 512 tokens. Both runs must give the same greedy tokens. On and off take turns; the table has medians. Writes it to
benchmarks/results/.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenmill_executor.engine import Engine
from tokenmill_executor.records import Admission, Plan
from tokenmill_executor.runner import SamplingParams
from tokenmill_service.logs import configure_logs

from benchmarks.bare import load_engine
from benchmarks.tables import keep, today

TOKEN_BUDGET = 512
BLOCK_SIZE = 16
OWN_TOKENS = 16
NEW_TOKENS = 32


@dataclass(frozen=True)
class Run:
    """`first_s`: seconds until each request's first token, from when all came. `blocks`: most held at once."""

    first_s: list[float]
    wall_s: float
    computed: int
    cached: int
    blocks: int
    outputs: list[list[int]]


def serve(engine: Engine, prompts: Sequence[list[int]], first_id: int) -> Run:
    """All at once; decodes first, then prompts in order, within the token budget."""
    left = {first_id + row: len(tokens) for row, tokens in enumerate(prompts)}
    params = SamplingParams(max_tokens=NEW_TOKENS, seed=0, temperature=0.0, ignore_eos=True)
    admit = [Admission(first_id + row, tokens, len(tokens), params) for row, tokens in enumerate(prompts)]
    outputs: dict[int, list[int]] = {sequence_id: [] for sequence_id in left}
    first_s: list[float] = []
    computed = cached = blocks = plan_id = 0
    start_s = time.perf_counter()
    while left:
        budget = TOKEN_BUDGET - sum(count == 0 for count in left.values())
        advance = {}
        for sequence_id, count in left.items():
            chunk = 1 if count == 0 else min(count, budget)
            budget -= chunk if count else 0
            if chunk:
                advance[sequence_id] = chunk
        plan_id += 1
        result = engine.carry_out(Plan(1, plan_id, (), admit, list(advance), list(advance.values())))
        admit = []
        now_s = time.perf_counter() - start_s
        tokens = iter(result.token_ids)
        hits = list(result.num_cached) or [0] * len(advance)
        for row, sequence_id in enumerate(advance):
            left[sequence_id] = max(0, left[sequence_id] - result.num_computed[row] - hits[row])
            if result.num_sampled[row]:
                first_s += [now_s] if not outputs[sequence_id] else []
                outputs[sequence_id].append(next(tokens))
            if result.finishes[row]:
                del left[sequence_id]
        computed, cached = computed + sum(result.num_computed), cached + sum(hits)
        blocks = max(blocks, result.blocks.held)
    return Run(first_s, time.perf_counter() - start_s, computed, cached, blocks, list(outputs.values()))


def row(name: str, runs: Sequence[Run]) -> str:
    first = statistics.median(statistics.median(run.first_s) for run in runs)
    last = statistics.median(max(run.first_s) for run in runs)
    wall = statistics.median(run.wall_s for run in runs)
    run = runs[0]
    total = run.computed + run.cached
    return f"| {name} | {first:.2f} | {last:.2f} | {wall:.2f} | {run.computed} | {run.cached / total:.1%} | {run.blocks} |"


def table(model: str, options: argparse.Namespace, on: Sequence[Run], off: Sequence[Run]) -> str:
    faster = statistics.median(o.wall_s for o in off) / statistics.median(o.wall_s for o in on)
    return "\n".join(
        [
            f"# Shared prefix, cache on and off, {model}, {today()}",
            "",
            f"`python -m benchmarks.prefix`: {options.requests} requests, {options.prefix} tokens shared, {OWN_TOKENS} of their "
            f"own, {NEW_TOKENS} output tokens; medians of {options.repeat}; {os.cpu_count()} cores ({platform.machine()}), load "
            f"{os.getloadavg()[0]:.1f} at the end. All done {faster:.1f}× sooner with the cache; the tokens are the same.",
            "",
            "| prefix cache | median first token s | last first token s | all done s | tokens computed | hit | most blocks held |",
            "|---|---:|---:|---:|---:|---:|---:|",
            row("off", off),
            row("on", on),
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="as the executor's --model")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--prefix", type=int, default=768)
    parser.add_argument("--repeat", type=int, default=3)
    options, flags = parser.parse_known_args()
    configure_logs("console", "warning")
    # Said for each engine: one that runs on the C++ kernels leaves torch, and whoever asks torch, a single thread.
    flags = ["--model", options.model, "--dtype", "bfloat16", "--threads", str(os.cpu_count()), *flags]
    # Room for all that come and the one before: the default, a quarter of the memory, takes seconds to be taken from the system.
    num_blocks = (options.requests + 1) * -(-(options.prefix + OWN_TOKENS + NEW_TOKENS) // BLOCK_SIZE)
    flags = ["--num-gpu-blocks-override", str(num_blocks), "--block-size", str(BLOCK_SIZE), *flags]
    rng = random.Random(42)
    shared = [rng.randrange(100, 40_000) for _ in range(options.prefix)]
    prompts = [[*shared, *(rng.randrange(100, 40_000) for _ in range(OWN_TOKENS))] for _ in range(options.requests)]
    runs: dict[bool, list[Run]] = {False: [], True: []}
    for caching in [False, True] * options.repeat:
        # A fresh engine each time: nothing is left of the run before.
        flag = "--enable-prefix-caching" if caching else "--no-enable-prefix-caching"
        engine = load_engine([*flags, flag])
        serve(engine, [[*shared, 99]], first_id=1)
        runs[caching].append(serve(engine, prompts, first_id=2))
    assert len({str(run.outputs) for both in runs.values() for run in both}) == 1, "the tokens differ"
    report = table(Path(options.model).stem, options, runs[True], runs[False])
    keep(f"prefix-{Path(options.model).stem}", report)


if __name__ == "__main__":
    main()
