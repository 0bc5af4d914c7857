"""What several parts of the benchmark share: made when the first of them asks for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Once(Generic[T]):
    """What could not be made is not tried again, which may take as long: all that ask for it are told why."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._made: list[T] = []
        self._failure = ""

    def __call__(self) -> T:
        if self._failure:
            raise RuntimeError(self._failure)
        if not self._made:
            try:
                self._made.append(self._make())
            except Exception as error:
                self._failure = f"as before: {error}"
                raise
        return self._made[0]
