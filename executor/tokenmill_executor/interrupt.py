"""Asks the engine to begin no further step of the plan in progress.

Must not know: why. Two counts in memory that stays where it is, so that C++ reads them between steps without Python.
"""

from __future__ import annotations

import numpy as np


class Interrupt:
    """`ask` is called on one thread, all else on the engine's. Counts, since a flag that is taken back could lose a question.

    `address` is that of two int64, how often was asked and how often heeded: there is a question while they differ.
    """

    __slots__ = ("_counts", "address")

    def __init__(self) -> None:
        self._counts = np.zeros(2, np.int64)
        self.address = self._counts.ctypes.data

    def ask(self) -> None:
        self._counts[0] += 1

    def heed(self) -> None:
        """Of all the questions that there were, one is answered."""
        self._counts[1] += 1

    def is_asked(self) -> bool:
        return bool(self._counts[0] != self._counts[1])
