"""Hit rate of the prefix cache on the Mooncake conversation trace, against that of a cache that never forgets.

    python -m benchmarks.mooncake TRACE [--limit N] [--device-tokens 1e6 4e6 ...] [--host-factors 0 2 8]

TRACE is `conversation_trace.jsonl` of the Mooncake release (Qin et al., FAST 2025), gzipped or not: 12,031 requests of an hour,
12,000 prompt tokens each. It has a hash for every 512 prompt tokens, chained over all before them, so the executor's own pool,
index and host tier run over it as they are, with blocks of 512 tokens and no model. Requests come one after another in the trace's
order; what one finds on the device or in host memory is a hit, of all its prompt but the last token. Blocks of output have no
hashes in the trace, and are found by neither. Writes a table to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenmill_executor.blocks import BlockPool
from tokenmill_executor.host_tier import HostTier
from tokenmill_workloads.arrivals import Arrival
from tokenmill_workloads.traces import read_trace

from benchmarks.tables import keep, today

BLOCK_SIZE = 512
DEVICE_TOKENS = (0.5e6, 1e6, 2e6, 4e6, 8e6, 16e6, 32e6)
HOST_FACTORS = (0, 2, 8)


class NoMemory:
    """Copies cost nothing, so what is in host memory always comes back."""

    def copy_out(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        pass

    def copy_in(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        pass

    def take_measured(self) -> tuple[int, float]:
        return 0, 0.0


@dataclass
class Hits:
    """In tokens."""

    prompt: int = 0
    device: int = 0
    host: int = 0

    @property
    def rate(self) -> float:
        return (self.device + self.host) / self.prompt


def chain(arrival: Arrival) -> list[bytes]:
    """Digests of the blocks that a request can find: full ones, and not the one of the last token."""
    # From 1 on: a hash of 0 means that there is no block before.
    return [(number + 1).to_bytes(8, "big") for number in arrival.hash_ids[: (arrival.prompt_tokens - 1) // BLOCK_SIZE]]


def best_possible(trace: Sequence[Arrival]) -> Hits:
    """Whatever came before is found."""
    seen: set[bytes] = set()
    hits = Hits()
    for arrival in trace:
        digests = chain(arrival)
        hits.prompt += arrival.prompt_tokens
        hits.device += BLOCK_SIZE * next((place for place, digest in enumerate(digests) if digest not in seen), len(digests))
        seen.update(digests)
    return hits


def replay(trace: Sequence[Arrival], device_blocks: int, host_blocks: int) -> Hits:
    """Each request takes its prefix and blocks for the rest, fills them, and leaves."""
    tier = HostTier(NoMemory(), host_blocks, BLOCK_SIZE) if host_blocks else None
    pool = BlockPool(device_blocks, BLOCK_SIZE, host=tier)
    hits, table = Hits(), pool.new_table()
    for arrival in trace:
        digests = chain(arrival)
        shared = pool.share(table, digests)
        back = 0 if tier is None else tier.worth_bringing_back(digests[shared:])
        if back:
            pool.bring_back(table, digests[shared : shared + back])
        pool.allocate(table, arrival.prompt_tokens + arrival.output_tokens)
        pool.store(table, digests, shared + back, len(digests))
        pool.release(table)
        hits.prompt += arrival.prompt_tokens
        hits.device += BLOCK_SIZE * shared
        hits.host += BLOCK_SIZE * back
        if tier is not None:
            tier.flush()
    pool.check([])
    return hits


def report(trace: Sequence[Arrival], name: str, device_tokens: Sequence[float], factors: Sequence[int]) -> str:
    started_s = time.perf_counter()
    best = best_possible(trace)
    lines = [
        f"# Prefix cache on {name}, {today()}",
        "",
        f"`python -m benchmarks.mooncake`: {len(trace)} requests, {best.prompt / 1e6:.0f} million prompt tokens, blocks of "
        f"{BLOCK_SIZE}. A cache that never forgets hits {best.rate:.1%} of the prompt tokens. Each cell: hit rate, its share of "
        "that best, and of the hits those from host memory.",
        "",
        "| tokens on the device | "
        + " | ".join("no host memory" if f == 0 else f"{f} times as many in host memory" for f in factors)
        + " |",
        "|---:|" + "---:|" * len(factors),
    ]
    for tokens in device_tokens:
        cells = []
        for factor in factors:
            blocks = int(tokens) // BLOCK_SIZE
            hits = replay(trace, blocks, factor * blocks)
            cells.append(f"{hits.rate:.1%}, {hits.rate / best.rate:.0%}, {hits.host / max(1, hits.device + hits.host):.0%}")
        lines.append(f"| {tokens / 1e6:g} million | " + " | ".join(cells) + " |")
    lines += ["", f"Took {time.perf_counter() - started_s:.0f} s.", ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--limit", type=int, help="only the first N requests")
    parser.add_argument("--device-tokens", type=float, nargs="+", default=DEVICE_TOKENS)
    parser.add_argument("--host-factors", type=int, nargs="+", default=HOST_FACTORS)
    options = parser.parse_args()
    trace = read_trace(options.trace, limit=options.limit)
    longest = max(arrival.prompt_tokens + arrival.output_tokens for arrival in trace)
    if min(options.device_tokens) < longest + BLOCK_SIZE:
        parser.error(f"--device-tokens: the longest request has {longest} tokens")
    text = report(trace, options.trace.name, options.device_tokens, options.host_factors)
    keep("mooncake", text)


if __name__ == "__main__":
    main()
