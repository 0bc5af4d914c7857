"""A state dict whose tensors are read, mapped or dequantised only when asked for, so that a model never lies in memory twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch


class LazyTensors(Mapping[str, torch.Tensor]):
    """Each read loads anew: keep what you read, and read it once."""

    def __init__(self, loaders: Mapping[str, Callable[[], torch.Tensor]]) -> None:
        self._loaders = dict(loaders)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._loaders[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._loaders)

    def __len__(self) -> int:
        return len(self._loaders)

    def __contains__(self, name: object) -> bool:
        return name in self._loaders
