"""One request of a workload, and what is done to many: their times, their lengths, their prompts. Must not know: files."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

# Ids below are often special or rare bytes; a prompt of other ids is as good as any for what a step costs.
_FIRST_PLAIN_TOKEN_ID = 256


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that comes `at_s` after the workload's start with so many tokens, and makes exactly `output_tokens`.

    `hash_ids` names the prompt's blocks of `hash_block_tokens` tokens: prompts whose first n ids are equal share the tokens of n
    blocks. Tokens that no id covers are the request's own.
    """

    at_s: float
    prompt_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()
    hash_block_tokens: int = 512


def poisson(arrivals: Sequence[Arrival], rate: float, seed: int = 42) -> tuple[Arrival, ...]:
    """The same requests in the same order, as a Poisson process of `rate` requests a second; the first one comes at once."""
    draw = random.Random(seed)
    timed: list[Arrival] = []
    at_s = 0.0
    for arrival in arrivals:
        timed.append(replace(arrival, at_s=at_s))
        at_s += draw.expovariate(rate)
    return tuple(timed)


def at_rate(arrivals: Sequence[Arrival], rate: float) -> tuple[Arrival, ...]:
    """The same gaps, all stretched or shrunk by one factor, so that `rate` requests come a second on average.

    The first comes at once. Requests that all come together have no gaps: they stay as they are.
    """
    if not arrivals:
        return ()
    first_s, span_s = arrivals[0].at_s, arrivals[-1].at_s - arrivals[0].at_s
    factor = (len(arrivals) - 1) / rate / span_s if span_s else 1.0
    return tuple(replace(arrival, at_s=(arrival.at_s - first_s) * factor) for arrival in arrivals)


def scale_lengths(arrivals: Sequence[Arrival], factor: float) -> tuple[Arrival, ...]:
    """Prompts, outputs and shared blocks times `factor`, each at least one token."""

    def scaled(tokens: int) -> int:
        return max(1, round(tokens * factor))

    return tuple(
        replace(
            arrival,
            prompt_tokens=scaled(arrival.prompt_tokens),
            output_tokens=scaled(arrival.output_tokens),
            hash_block_tokens=scaled(arrival.hash_block_tokens),
        )
        for arrival in arrivals
    )


def prompts(arrivals: Sequence[Arrival], vocab_size: int, seed: int = 42) -> list[tuple[int, ...]]:
    """Token ids of each prompt, drawn from ordinary tokens. Equal hash ids give equal tokens, the same seed the same prompts."""
    return [_prompt(number, arrival, vocab_size, seed) for number, arrival in enumerate(arrivals)]


def _prompt(number: int, arrival: Arrival, vocab_size: int, seed: int) -> tuple[int, ...]:
    tokens: list[int] = []
    for hash_id in arrival.hash_ids:
        size = min(arrival.hash_block_tokens, arrival.prompt_tokens - len(tokens))
        tokens += _tokens(f"{seed} block {hash_id}", size, vocab_size)
    return tuple(tokens + _tokens(f"{seed} request {number}", arrival.prompt_tokens - len(tokens), vocab_size))


def _tokens(seed: str, count: int, vocab_size: int) -> list[int]:
    draw = random.Random(seed)
    first = min(_FIRST_PLAIN_TOKEN_ID, vocab_size - 1)
    return [draw.randrange(first, vocab_size) for _ in range(count)]
