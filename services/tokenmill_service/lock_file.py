"""A lock that the operating system frees when its process ends, however it ends. Must not know: what is locked."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


def take_lock(path: Path) -> int:
    """Makes the file if there is none, and returns the descriptor that has it locked, until it is closed.

    Raises BlockingIOError when another descriptor has it, or another OSError when the file cannot be made.
    """
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
