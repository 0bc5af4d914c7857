"""The tokens a request must get, as a function of the request and the index alone, so that a lost, doubled or crossed token shows.

A request is known here by its seed. Shares no code with scheduler or executor.
"""

from __future__ import annotations

EOS = 0


def eos_index(seed: int) -> int | None:
    """Every third request ends by itself, after 1 to 11 tokens."""
    return seed * 7 % 11 if seed % 3 == 0 else None


def token(seed: int, index: int) -> int:
    return EOS if index == eos_index(seed) else 1 + (seed * 1_000_003 + index * 8_191) % 49_999


def whole_output(seed: int, num_prompt_tokens: int, max_tokens: int, max_model_len: int) -> list[int]:
    """All output of a request that is left in peace."""
    most = min(max_tokens, max_model_len - num_prompt_tokens)
    end = eos_index(seed)
    return [token(seed, index) for index in range(most if end is None else min(most, end + 1))]
