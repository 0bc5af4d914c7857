"""A state dict whose tensors are read, mapped or dequantised only when asked for, and a few rows at a time where that is enough, so
that a model never lies in memory twice, nor a large matrix in a wider type.

Must not know: files, kernels' order of weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol, TypeVar

import torch

from tokenmill_executor.model.int4 import Int4Rows

Part_co = TypeVar("Part_co", covariant=True)


class Rows(Protocol[Part_co]):
    """The rows of a matrix, or the elements of a vector, each read when asked for. A tensor is such rows too."""

    @property
    def shape(self) -> torch.Size: ...

    def __getitem__(self, rows: slice, /) -> Part_co: ...


class LazyTensors(Mapping[str, torch.Tensor]):
    """Each read loads anew: keep what you read, and read it once. `codes` are of those stored as 4-bit codes."""

    def __init__(self, rows: Mapping[str, Rows[torch.Tensor]], codes: Mapping[str, Rows[Int4Rows]] | None = None) -> None:
        self._rows = dict(rows)
        self._codes = dict(codes or {})

    def rows(self, name: str) -> Rows[torch.Tensor]:
        return self._rows[name]

    def int4(self, name: str) -> Rows[Int4Rows] | None:
        """As it is stored, if it is stored as 4-bit codes."""
        return self._codes.get(name)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._rows[name][:]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, name: object) -> bool:
        return name in self._rows
