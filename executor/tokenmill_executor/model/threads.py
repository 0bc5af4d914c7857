"""Torch's threads, which are the process's: models that are loaded one after the other share them. Must not know: models."""

from __future__ import annotations

import torch

_had: int | None = None


def use_threads(asked: int | None) -> int:
    """Sets so many; without a number, as many as there were before `leave_one_thread`. Returns how many there are now."""
    if asked is None and _had is not None and torch.get_num_threads() == 1:
        asked = _had
    if asked is not None:
        torch.set_num_threads(asked)
    return torch.get_num_threads()


def leave_one_thread() -> None:
    """Where little is left to torch its idle threads would spin on the cores that others want."""
    global _had
    _had = torch.get_num_threads()
    torch.set_num_threads(1)
