"""Keys from a terminal, one at a time, as they are pressed. Must not know: what they do."""

from __future__ import annotations

import os
import select
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Protocol


class Keys(Protocol):
    def wait(self, seconds: float) -> str | None:
        """The next key; None when none is pressed for so long."""


class NoKeys:
    """Where there is no terminal to press any on."""

    def wait(self, seconds: float) -> str | None:
        time.sleep(max(seconds, 0.0))
        return None


class TerminalKeys:
    """What arrow keys and the like send is passed over."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def wait(self, seconds: float) -> str | None:
        ready, _, _ = select.select([self._descriptor], [], [], max(seconds, 0.0))
        if not ready:
            return None
        pressed = os.read(self._descriptor, 64).decode(errors="ignore")
        return pressed if len(pressed) == 1 else ""


@contextmanager
def keys_of(source: IO[str]) -> Iterator[Keys]:
    """Of a terminal in its mode for single keys, which is put back as it was; Ctrl-C interrupts as ever."""
    if not source.isatty():
        yield NoKeys()
        return
    descriptor = source.fileno()
    before = termios.tcgetattr(descriptor)
    # What was pressed before is kept.
    tty.setcbreak(descriptor, termios.TCSADRAIN)
    try:
        yield TerminalKeys(descriptor)
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
