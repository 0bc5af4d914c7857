"""Sequences that fit into the KV cache by `--kv-cache-dtype`, at the same memory: as Describe tells it, and held for real.

    python -m benchmarks.kv_capacity [--model smollm2-135m-instruct] [--memory 24MiB] [--length 256]

For each type an executor is loaded as its flags say; then prompts of one length are computed until one gets no blocks. Writes its
table to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import os
import random
from dataclasses import dataclass

from tokenmill_executor.attention.quantization import KV_CACHE_DTYPES
from tokenmill_executor.engine import Engine
from tokenmill_executor.loading import Loader
from tokenmill_executor.records import Admission, Plan
from tokenmill_executor.runner import SamplingParams
from tokenmill_executor.settings import parse_settings
from tokenmill_service.logs import configure_logs

from benchmarks.tables import keep, today


@dataclass(frozen=True, slots=True)
class Row:
    """`blocks` as Describe tells them; `resident`: sequences whose K and V were all in the cache at once."""

    name: str
    runs_in: str
    blocks: int
    tokens: int
    resident: int

    def line(self, base: Row) -> str:
        growth = f"{self.blocks / base.blocks:.2f}×"
        return f"| {self.name} | {self.runs_in} | {self.blocks} | {self.tokens} | {self.resident} | {growth} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="as the executor's --model")
    parser.add_argument("--memory", default="24MiB", help="as the executor's --kv-cache-memory-bytes")
    parser.add_argument("--length", type=int, default=256, help="tokens of a sequence")
    options = parser.parse_args()
    configure_logs("console", "error")
    rows = [_measure(name, options) for name in KV_CACHE_DTYPES]
    report = _table(rows, options)
    keep("kv-capacity", report)


def _measure(name: str, options: argparse.Namespace) -> Row:
    flags = ["--model", options.model, "--kv-cache-memory-bytes", options.memory, "--max-num-seqs", "512"]
    loader = Loader(parse_settings([*flags, "--kv-cache-dtype", name, "--no-enable-prefix-caching"], os.environ))
    engine = loader.load()
    description = loader.offer("capacity").description
    tokens = description.num_blocks * description.block_size
    return Row(name, description.dtype, description.num_blocks, tokens, _hold(engine, options.length))


def _hold(engine: Engine, length: int) -> int:
    """Admits and computes prompts, each in a step of its own, until one finds no blocks; all before it are held still."""
    rng = random.Random(1)
    params = SamplingParams(max_tokens=2, seed=0, temperature=0.0, ignore_eos=True)
    for held in range(1 << 20):
        admission = Admission(held + 1, [rng.randrange(100, 40_000) for _ in range(length)], length, params)
        result = engine.carry_out(Plan(1, held + 1, (), [admission], [held + 1], [length]))
        engine.check()
        if result.faults:
            return held
    raise AssertionError("the cache never filled")


def _table(rows: list[Row], options: argparse.Namespace) -> str:
    settings = f"{options.model}, {options.memory} for the cache, sequences of {options.length} tokens"
    return "\n".join(
        [
            f"# Capacity of the KV cache by its type, {today()}",
            "",
            f"`python -m benchmarks.kv_capacity`: {settings}.",
            "",
            "| --kv-cache-dtype | runs in | blocks in Describe | tokens | sequences resident | blocks of auto's |",
            "|---|---|---:|---:|---:|---:|",
            *(row.line(rows[0]) for row in rows),
            "",
        ]
    )


if __name__ == "__main__":
    main()
