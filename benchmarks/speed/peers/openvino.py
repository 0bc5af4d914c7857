"""OpenVINO GenAI's continuous batching, in process: a worker in its own environment is handed whole workloads."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from tokenmill_workloads import prompts

from benchmarks.speed.peers.models import requantized
from benchmarks.speed.peers.peer import VOCAB_SIZE, PeerError, Send, environment
from benchmarks.speed.workloads import Run, Workload

_WORKER = Path(__file__).with_name("openvino_worker.py")


class OpenVino:
    def __init__(self, folder: Path, weights: str) -> None:
        self._folder = folder
        self._weights = weights
        self.name = f"OpenVINO {weights}"
        self.how = f"`openvino-genai`, {weights} weights, bfloat16 arithmetic, prefix cache on, in process: no service around it"

    def install(self) -> None:
        self._bin = environment(self._folder, "openvino-genai")
        self._model = requantized(self._folder, self._weights)

    @contextmanager
    def serving(self, slots: int) -> Iterator[Send]:
        log = self._folder / "openvino.log"
        with log.open("w") as errors:
            # -P: the folder of the worker has a file of the library's name.
            worker = subprocess.Popen(
                [str(self._bin / "python"), "-P", str(_WORKER), str(self._model), str(slots)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        assert worker.stdin is not None
        assert worker.stdout is not None
        asked, answers = worker.stdin, worker.stdout

        def send(workload: Workload, seed: int, length_scale: float) -> Run:
            arrivals = workload.arrivals(length_scale)
            lengths = [arrival.output_tokens for arrival in arrivals]
            answer = _ask(asked, answers, {"prompts": prompts(arrivals, VOCAB_SIZE, seed), "output_tokens": lengths})
            if answer["made"] != lengths:
                raise PeerError(f"{workload.name} asked for {sum(lengths)} tokens, {sum(answer['made'])} came")
            return Run(workload.counted_tokens(length_scale) / answer["wall_s"], sum(lengths))

        try:
            yield send
        finally:
            asked.close()
            worker.wait()


def _ask(asked: IO[str], answers: IO[str], workload: dict[str, Any]) -> dict[str, Any]:
    asked.write(json.dumps(workload) + "\n")
    asked.flush()
    # The library writes to standard output, too.
    for line in answers:
        if line.startswith("{"):
            answer: dict[str, Any] = json.loads(line)
            return answer
    raise PeerError("the worker ended: see its log")
