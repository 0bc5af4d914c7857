"""In how few steps a burst can be decoded, where each of its requests makes a token a step in one of so many slots.

Must not know: machines, the core.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapreplace


def steps_in_order(outputs: Sequence[int], slots: int) -> int:
    """Of requests that begin in this order, each as soon as a slot is free (Graham's list scheduling, 1966)."""
    ends = [0] * slots
    for tokens in outputs:
        heapreplace(ends, ends[0] + tokens)
    return max(ends)


def steps_packed(outputs: Sequence[int], slots: int) -> int:
    """In the best of all orders no fewer: of the longest request, or of slots that all end together."""
    return max(max(outputs), -(-sum(outputs) // slots))
