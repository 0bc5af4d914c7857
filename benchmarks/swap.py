"""A preempted sequence resumes: by recomputation, and by swap from host memory. Seconds from its admission to its next token.

    python -m benchmarks.swap [--model PATH] [--contexts 256 1024 2048] [--repeat 3] [executor flags ...]

Without --model it takes SmolLM2-135M-Instruct from the model cache, in bfloat16 on the C++ kernels where they run. Each time a
sequence is computed, is given up for another one as long, which takes all blocks of the pool, and is admitted again; a step takes
at most 512 tokens. The other one's prefill shows what it costs that the first one's blocks move out. The two ways take turns, on
engines that have served one such pair before; the table has medians. Writes it to benchmarks/results/.
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
from itertools import count
from pathlib import Path

from tokenmill_executor.engine import Engine
from tokenmill_executor.loading import Loader
from tokenmill_executor.records import Admission, Plan
from tokenmill_executor.runner import SamplingParams
from tokenmill_executor.settings import parse_settings
from tokenmill_service.logs import configure_logs

from benchmarks.tables import keep, today

TOKEN_BUDGET = 512
HOST_GIB = 2
PARAMS = SamplingParams(max_tokens=8, seed=0, temperature=0.0, ignore_eos=True)


@dataclass(frozen=True)
class Resumed:
    """`cached` tokens were not computed again; `other_s` is the prefill of the sequence that took its blocks."""

    resume_s: float
    other_s: float
    cached: int
    token: int


class Sequences:
    """Gives an engine one sequence at a time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._plans = count(1)
        self._sequences = count(1)

    def start(self, tokens: Sequence[int], num_prompt: int) -> tuple[int, int, float]:
        """To its next token, then gives it up. → that token, how many were found in the cache, the seconds until it came."""
        sequence_id = next(self._sequences)
        admit = [Admission(sequence_id, tokens, num_prompt, PARAMS)]
        cached, sampled = 0, list[int]()
        started_s = time.perf_counter()
        while not sampled:
            result = self._engine.carry_out(Plan(1, next(self._plans), (), admit, [sequence_id], [TOKEN_BUDGET]))
            assert not result.faults, result.faults
            admit, sampled, cached = [], list(result.token_ids), cached + sum(result.num_cached)
        took_s = time.perf_counter() - started_s
        self._engine.carry_out(Plan(1, next(self._plans), [sequence_id]))
        return sampled[0], cached, took_s


def preempt(sequences: Sequences, length: int, rng: random.Random) -> Resumed:
    """A sequence, another one in its place, and the first one again with its first token of output."""
    first, other = ([rng.randrange(100, 40_000) for _ in range(length)] for _ in range(2))
    token, _, _ = sequences.start(first, length)
    _, _, other_s = sequences.start(other, length)
    after, cached, resume_s = sequences.start([*first, token], length)
    return Resumed(resume_s, other_s, cached, after)


def make(flags: Sequence[str], num_blocks: int, host_gib: int) -> Engine:
    blocks = ["--num-gpu-blocks-override", str(num_blocks), "--kv-offloading-size", str(host_gib)]
    return Loader(parse_settings([*flags, *blocks], os.environ)).load()


def measure(flags: Sequence[str], length: int, repeat: int) -> tuple[list[Resumed], list[Resumed]]:
    """Recomputed and swapped."""
    # One block more than a sequence, so that nothing of it is left when the other one has been there.
    num_blocks = -(-(length + 2) // 16)
    ways = [Sequences(make(flags, num_blocks, host_gib)) for host_gib in (0, HOST_GIB)]
    runs: tuple[list[Resumed], list[Resumed]] = ([], [])
    for turn in range(repeat + 1):
        for sequences, results in zip(ways, runs, strict=True):
            resumed = preempt(sequences, length, random.Random(turn))
            if turn:
                results.append(resumed)
    assert [run.token for run in runs[0]] == [run.token for run in runs[1]], "the tokens differ"
    return runs


def row(length: int, computed: Sequence[Resumed], swapped: Sequence[Resumed]) -> str:
    computed_s, swapped_s = (statistics.median(run.resume_s for run in runs) for runs in (computed, swapped))
    other_s, moving_s = (statistics.median(run.other_s for run in runs) for runs in (computed, swapped))
    back = statistics.median(run.cached for run in swapped)
    return (
        f"| {length} | {computed_s * 1e3:.0f} | {swapped_s * 1e3:.0f} | {computed_s / swapped_s:.1f} | {back:.0f} "
        f"| {other_s * 1e3:.0f} | {moving_s * 1e3:.0f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="as the executor's --model")
    parser.add_argument("--contexts", type=int, nargs="+", default=[256, 1024, 2048])
    parser.add_argument("--repeat", type=int, default=3)
    options, flags = parser.parse_known_args()
    configure_logs("console", "error")
    # Said for each engine: one that runs on the C++ kernels leaves torch, and whoever asks torch, a single thread.
    flags = ["--model", options.model, "--dtype", "bfloat16", "--threads", str(os.cpu_count()), *flags]
    lines = [
        f"# Preempted, then resumed: recomputed or swapped, {Path(options.model).stem}, {today()}",
        "",
        f"`python -m benchmarks.swap`: milliseconds to the next token, medians of {options.repeat}; the same tokens both ways. "
        f"{os.cpu_count()} cores ({platform.machine()}), load {os.getloadavg()[0]:.1f} at the start.",
        "",
        "| context | recomputed | swapped | times faster | tokens copied back | prefill in its place | while it moves out |",
        "|---:|---:|---:|---:|---:|---:|---:|",
    ]
    lines += [row(length, *measure(flags, length, options.repeat)) for length in options.contexts]
    report = "\n".join([*lines, ""])
    keep(f"swap-{Path(options.model).stem}", report)


if __name__ == "__main__":
    main()
