"""A state dict whose tensors are read, mapped or dequantised only when asked for, so that a model never lies in memory twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch

from tokenmill_executor.model.int4 import Int4Rows


class LazyTensors(Mapping[str, torch.Tensor]):
    """Each read loads anew: keep what you read, and read it once. `int4_loaders` are of those stored as 4-bit codes."""

    def __init__(
        self,
        loaders: Mapping[str, Callable[[], torch.Tensor]],
        int4_loaders: Mapping[str, Callable[[], Int4Rows]] | None = None,
    ) -> None:
        self._loaders = dict(loaders)
        self._int4_loaders = dict(int4_loaders or {})

    def int4(self, name: str) -> Int4Rows | None:
        """As it is stored, if it is stored as 4-bit codes."""
        load = self._int4_loaders.get(name)
        return None if load is None else load()

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._loaders[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._loaders)

    def __len__(self) -> int:
        return len(self._loaders)

    def __contains__(self, name: object) -> bool:
        return name in self._loaders
