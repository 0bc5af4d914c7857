"""The fixed workloads: a burst of mixed lengths, and one that stresses each thing a server does. All requests come at once."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

from tokenmill_workloads.arrivals import Arrival

_SHARED = 0


def burst(
    count: int = 20, *, seed: int = 42, prompt_tokens: tuple[int, int] = (10, 100), output_tokens: tuple[int, int] = (20, 200)
) -> tuple[Arrival, ...]:
    """Mixed lengths, drawn evenly from the ranges, both ends included. The same seed gives the same workload."""
    draw = random.Random(seed)
    return tuple(Arrival(0.0, draw.randint(*prompt_tokens), draw.randint(*output_tokens)) for _ in range(count))


def decode_heavy(count: int = 32) -> tuple[Arrival, ...]:
    """Short prompts, long outputs: steps of decoding sequences only."""
    return (Arrival(0.0, 32, 128),) * count


def prefill_heavy(count: int = 16) -> tuple[Arrival, ...]:
    """Long prompts, short outputs: steps full of prompt tokens."""
    return (Arrival(0.0, 1024, 16),) * count


def shared_prefix(count: int = 16) -> tuple[Arrival, ...]:
    """The same 768 tokens and then 32 of their own: what a prefix cache is for."""
    return tuple(Arrival(0.0, 800, 32, (_SHARED,), hash_block_tokens=768) for _ in range(count))


def single_stream() -> tuple[Arrival, ...]:
    """One request alone: how fast tokens can come at all."""
    return (Arrival(0.0, 32, 128),)


# By the names that command lines take.
FIXED: Mapping[str, Callable[[], tuple[Arrival, ...]]] = {
    "burst": burst,
    "decode-heavy": decode_heavy,
    "prefill-heavy": prefill_heavy,
    "shared-prefix": shared_prefix,
    "single-stream": single_stream,
}
