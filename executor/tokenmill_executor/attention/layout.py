"""Which layers share KV blocks: layers that see alike, in groups of equally many, so that one pool of equal blocks serves all.

A model whose layers all see alike is one group, and its blocks hold all layers. One that mixes windows and full attention has
several, each with as many layers as the rarer kind has; the last group of a kind may leave places empty. The idea is that of
vLLM's hybrid KV cache manager.

Must not know: torch, sequences, how many blocks there are.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from tokenmill_executor.runner import BlockGroup


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """`places` has for each layer its group and its place among the group's layers, of which there are `layers_per_group`."""

    groups: tuple[BlockGroup, ...]
    places: tuple[tuple[int, int], ...]
    layers_per_group: int


def cache_layout(windows: SequenceOf[int | None], sinks: int = 0) -> CacheLayout:
    """Of layers with these windows."""
    kinds: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        kinds.setdefault(window, []).append(layer)
    size = min(map(len, kinds.values()))
    groups: list[BlockGroup] = []
    places = [(0, 0)] * len(windows)
    for window, layers in kinds.items():
        for index, layer in enumerate(layers):
            places[layer] = (len(groups) + index // size, index % size)
        groups += [BlockGroup(window, 0 if window is None else sinks)] * -(-len(layers) // size)
    return CacheLayout(tuple(groups), tuple(places), size)
