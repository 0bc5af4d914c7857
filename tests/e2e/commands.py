"""The `tokenmill` command as a process, as a user runs it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

TIMEOUT_S = 120.0


def tokenmill(*argv: str, stdin: str = "", cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end."""
    return subprocess.run(
        _command(argv),
        input=stdin,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        cwd=cwd,
        env=_environment(environment),
        check=False,
    )


def until(holds: Callable[[], bool]) -> None:
    """Returns once it holds; AssertionError when it never does."""
    give_up_s = time.monotonic() + TIMEOUT_S
    while not holds():
        assert time.monotonic() < give_up_s, "it never came to hold"
        time.sleep(0.02)


class Running:
    """A command that goes on; killed when the context is left. What it writes, on either stream, is in `text`."""

    def __init__(self, *argv: str, cwd: Path | None = None, **environment: str) -> None:
        self._process = subprocess.Popen(
            _command(argv), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=cwd, env=_environment(environment)
        )
        self._changed = threading.Condition()
        self._lines: list[str] = []
        self._ended = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                with self._changed:
                    self._lines.append(line)
                    self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    @property
    def text(self) -> str:
        return "".join(self._lines)

    def expect(self, pattern: str) -> re.Match[str]:
        """The first match in what it writes, now or later."""
        with self._changed:
            found = self._changed.wait_for(lambda: re.search(pattern, self.text) or self._ended, TIMEOUT_S)
        match = re.search(pattern, self.text)
        assert match is not None, f"{pattern!r} is not in (ended: {bool(found)}):\n{self.text}"
        return match

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def wait(self) -> int:
        code = self._process.wait(TIMEOUT_S)
        self._reader.join(TIMEOUT_S)
        return code

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            self.wait()


def _command(argv: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "tokenmill_cli.main", *argv]


def _environment(extra: dict[str, str]) -> dict[str, str]:
    """Without settings of whoever runs the tests, and one thread: tests share few cores."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TOKENMILL_")}
    return {**inherited, "OMP_NUM_THREADS": "1", **extra}
