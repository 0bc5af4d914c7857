"""CPU time of processes by thread, as Linux counts it: unlike wall time it says the same on a busy machine."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

_LOOK_S = 0.5
_IDLE_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class CpuTime:
    """Seconds. `main`: of the main thread, which is the event loop's; `others`: of all other threads."""

    main: float
    others: float

    @classmethod
    def of(cls, pid: int) -> Self:
        """So far. What ended threads have used is not in it."""
        seconds = {}
        for thread in Path(f"/proc/{pid}/task").iterdir():
            # One may end meanwhile.
            with suppress(FileNotFoundError, ProcessLookupError):
                seconds[thread.name] = int((thread / "schedstat").read_text().split()[0]) / 1e9
        main = seconds.pop(str(pid))
        return cls(main, sum(seconds.values()))

    @property
    def total(self) -> float:
        return self.main + self.others

    def since(self, before: CpuTime) -> CpuTime:
        return CpuTime(self.main - before.main, self.others - before.others)


def wait_idle(pid: int) -> None:
    """Until the process has nothing left to do: as an executor, whose memory is populated while nobody wants anything."""
    before, now = 0.0, CpuTime.of(pid).total
    while now - before > _IDLE_SHARE * _LOOK_S:
        time.sleep(_LOOK_S)
        before, now = now, CpuTime.of(pid).total
