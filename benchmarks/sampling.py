"""Milliseconds to choose the tokens of a step on the CPU: the C++ kernels beside torch.

    python -m benchmarks.sampling [--rounds 20] [--threads 1]

Logits are random over a vocabulary of 49,152, and thirty tokens of a row stand out, as in a text; in the `flat` rows none do. Each
figure is the least of its rounds; the ways take turns in each round, each after a run that is not counted, as a step's logits come
from the cache. Writes its table to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

import torch
from tokenmill_executor.runner import SamplingInput, SamplingParams
from tokenmill_executor.sampling import Sampler
from tokenmill_executor.sampling.kernels import SamplingKernels

from benchmarks.tables import keep, today

VOCAB_SIZE = 49_152
ROWS = (1, 8, 32)
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature 1": {},
    "temperature 0.8, top-p 0.95": {"temperature": 0.8, "top_p": 0.95},
    "temperature 0.8, top-k 50": {"temperature": 0.8, "top_k": 50},
    "temperature 0.8, top-p 0.95, top-k 50": {"temperature": 0.8, "top_p": 0.95, "top_k": 50},
    "min-p 0.05": {"min_p": 0.05},
    "flat, top-p 0.95": {"top_p": 0.95},
    "greedy, 5 log probabilities": {"temperature": 0.0, "logprobs": 5},
    "greedy, repetition penalty 1.1": {"temperature": 0.0, "repetition_penalty": 1.1},
}
Times = dict[str, dict[str, list[float]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    ways = {"torch": Sampler((0,)), "C++": Sampler((0,), SamplingKernels(arguments.threads))}
    table = _table(_measure(ways, arguments.rounds), arguments.threads)
    keep("sampling", table)


@torch.inference_mode()
def _measure(ways: dict[str, Sampler], rounds: int) -> Times:
    """Least milliseconds by parameters, way and number of rows."""
    times_ms: Times = {}
    for name, params in PARAMS.items():
        logits = _logits(flat="flat" in name)
        times_ms[name] = {way: [float("inf")] * len(ROWS) for way in ways}
        for index, rows in enumerate(ROWS):
            samples = [_sample(row, params) for row in range(rows)]
            for _ in range(rounds):
                for way, sampler in ways.items():
                    sampler.sample(logits[:rows], samples)
                    started_s = time.perf_counter()
                    sampler.sample(logits[:rows], samples)
                    times_ms[name][way][index] = min(times_ms[name][way][index], 1e3 * (time.perf_counter() - started_s))
    return times_ms


def _logits(flat: bool) -> torch.Tensor:
    logits = torch.randn((max(ROWS), VOCAB_SIZE), generator=torch.Generator().manual_seed(0)) * 2.5
    if not flat:
        logits[:, 100:130] += 9
    return logits


def _sample(row: int, params: dict[str, Any]) -> SamplingInput:
    """150 known tokens, three of them distinct."""
    return SamplingInput(row, [1, 2, 3] * 50, 40, SamplingParams(max_tokens=500, seed=row, **params))


def _table(times_ms: Times, threads: int) -> str:
    rows = [
        f"| {name} | "
        + " | ".join(
            f"{before:.2f} → {after:.2f} ({before / after:.1f}×)" for before, after in zip(ways["torch"], ways["C++"], strict=True)
        )
        + " |"
        for name, ways in times_ms.items()
    ]
    return "\n".join(
        (
            f"# Choosing the tokens of a step on the CPU, {today()}",
            "",
            f"`python -m benchmarks.sampling`, threads {threads}, vocabulary {VOCAB_SIZE:,}, torch {torch.__version__}, load "
            f"{os.getloadavg()[0]:.1f} at the end. Milliseconds, least of the rounds: torch → C++ kernels.",
            "",
            "| | " + " | ".join(f"{rows} row{'s' * (rows > 1)}" for rows in ROWS) + " |",
            "|---" * (len(ROWS) + 1) + "|",
            *rows,
            "",
        )
    )


if __name__ == "__main__":
    main()
