"""Writes the journal beside the loop: handing over is one append, all else is a thread's work.

The buffer is bounded. What does not fit is not written, and the file and the log say how much that is: a slow disk must never slow
a step. The file is bounded, too; one that is there from an earlier process is kept beside it as FILE.1. An error in writing ends
the journal, not the service. Must not know: the loop, what events mean.
"""

from __future__ import annotations

import gzip
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, cast

import structlog

from tokenmill_scheduler.core.events import Event
from tokenmill_scheduler.core.scheduler import SchedulerConfig
from tokenmill_scheduler.journal import lines

MAX_BUFFERED = 4096
# The thread looks this often, so that the loop never has to wake it.
INTERVAL_S = 0.1

_Happened = tuple[int, float, Event, lines.Outcome]


class JournalWriter:
    """Opens the file at once. Raises OSError. `happened` is called by one thread only."""

    def __init__(self, path: Path, config: SchedulerConfig, max_bytes: int, max_buffered: int = MAX_BUFFERED) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._max_buffered = max_buffered
        # Events, and how many are missing before the next one.
        self._buffer: deque[_Happened | int] = deque()
        self._number = 0
        self._missing = 0
        self._over = False
        self._closing = threading.Event()
        self._size_bytes = 0
        self._log = structlog.get_logger(__name__).bind(file=str(path))
        self._file: BinaryIO | None = _open(path)
        self._write(lines.header(config))
        self._thread = threading.Thread(target=self._run, name="plan-journal", daemon=True)
        self._thread.start()

    def happened(self, now_s: float, event: Event, outcome: lines.Outcome) -> None:
        """Returns at once. The records are not to change afterwards; they are frozen."""
        if self._over:
            return
        self._number += 1
        if len(self._buffer) >= self._max_buffered:
            if not self._missing:
                self._log.warning("the plan journal falls behind: events are missing in it from here on", event_number=self._number)
            self._missing += 1
            return
        if self._missing:
            self._buffer.append(self._missing)
            self._missing = 0
        self._buffer.append((self._number, now_s, event, outcome))

    def close(self) -> None:
        """Returns once all that was taken is written."""
        self._closing.set()
        self._thread.join()

    # ---- the thread ------------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing.wait(INTERVAL_S):
                self._drain()
            self._drain()
            if self._missing:
                self._write(lines.dump({"missing": self._missing}))
        except Exception as error:
            # Whatever it is, the service goes on.
            self._log.error(
                "the plan journal cannot be written any more", error=str(error), exc_info=not isinstance(error, OSError)
            )
        finally:
            self._end()

    def _drain(self) -> None:
        while self._buffer and self._file is not None:
            # Whoever waits for the interpreter gets it between two lines, not after a switch interval of 5 ms.
            time.sleep(0)
            taken = self._buffer.popleft()
            self._write(lines.dump({"missing": taken}) if isinstance(taken, int) else lines.entry(*taken))
            if self._size_bytes >= self._max_bytes:
                self._write(lines.dump({"full": self._size_bytes}))
                self._log.warning("the plan journal is full: nothing more is written to it", size_bytes=self._size_bytes)
                self._end()
        if self._file is not None:
            self._file.flush()

    def _write(self, line: str) -> None:
        if self._file is not None:
            self._size_bytes += self._file.write(f"{line}\n".encode())

    def _end(self) -> None:
        """Nothing is taken any more, so that a full or broken journal takes no memory either."""
        self._over = True
        self._buffer.clear()
        if self._file is not None:
            file, self._file = self._file, None
            with suppress(OSError):
                file.close()


def _open(path: Path) -> BinaryIO:
    if path.is_file():
        path.replace(path.with_name(f"{path.name}.1"))
    # The fastest level: journals shrink to a tenth by it already.
    return cast(BinaryIO, gzip.open(path, "wb", compresslevel=1)) if path.suffix == ".gz" else path.open("wb")
