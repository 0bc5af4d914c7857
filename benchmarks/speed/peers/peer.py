"""What a peer is, and what several of them need: an environment, a server process on a free port."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

from benchmarks.speed.measure import bench
from benchmarks.speed.workloads import Run, Workload

VOCAB_SIZE = 49_152
# To build llama.cpp takes two busy cores most of it.
INSTALL_LIMIT_S = 3_600.0
START_LIMIT_S = 600.0
STOP_LIMIT_S = 30.0

# A workload, a seed and a length scale.
Send = Callable[[Workload, int, float], Run]


class PeerError(Exception):
    """It cannot be installed, started or used here; says why."""


@dataclass(frozen=True)
class PeerMeasured:
    """Runs by the workload's name. `how`: what was run, or why nothing was."""

    name: str
    how: str
    runs: Mapping[str, Sequence[Run]] = field(default_factory=dict)


class Peer(Protocol):
    name: str
    how: str

    def install(self) -> None:
        """Once: what is there already is left alone. Raises PeerError."""
        ...

    def serving(self, slots: int) -> AbstractContextManager[Send]:
        """At most `slots` sequences in a step. Raises PeerError."""
        ...


def environment(folder: Path, requirement: str, **variables: str) -> Path:
    """The `bin` folder of a virtual environment in `folder` that has the requirement, installed with these variables set."""
    place = folder / requirement
    done = place / ".installed"
    if not done.exists():
        python = place / "bin" / "python"
        if not python.exists():
            _run([sys.executable, "-m", "venv", str(place)])
        _run([str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", requirement], **variables)
        done.touch()
    return place / "bin"


def _run(command: Sequence[str], **variables: str) -> None:
    finished = subprocess.run(
        command, capture_output=True, text=True, timeout=INSTALL_LIMIT_S, check=False, env={**os.environ, **variables}
    )
    if finished.returncode:
        raise PeerError(f"`{' '.join(command[-2:])}` failed: {failure(finished.stderr)}")


def failure(told: str) -> str:
    """The first error of a compiler or of its configuration, which pip repeats in the midst of much else; else pip's last word."""
    lines = [line.strip() for line in told.splitlines() if line.strip()] or ["no reason given"]
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        if line.startswith("CMake Error"):
            return f"{line} {following}".strip()
        if re.search(r"(^|[: ])(fatal )?error: (?!subprocess-exited)", line):
            return line
    return lines[-1]


@contextmanager
def http_server(command: Sequence[str], folder: Path, **variables: str) -> Iterator[Send]:
    """A server of OpenAI's API, at a free port that is added to its command; its log is in `folder`."""
    port = _free_port()
    log = folder / f"{Path(command[0]).name}.log"
    with log.open("w") as out:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            stdout=out,
            stderr=out,
            env={**os.environ, **variables},
            process_group=0,
        )
    try:
        _wait_until_healthy(process, f"http://127.0.0.1:{port}/health", log)
        server = ("--base-url", f"http://127.0.0.1:{port}/v1", "--vocab-size", str(VOCAB_SIZE))
        yield lambda workload, seed, length_scale: bench(workload, seed, length_scale, *server)
    finally:
        # All that it has started, too.
        kill = partial(os.killpg, process.pid)
        kill(signal.SIGTERM) if process.poll() is None else None
        try:
            process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            kill(signal.SIGKILL)
            process.wait()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _wait_until_healthy(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    give_up_s = time.monotonic() + START_LIMIT_S
    while time.monotonic() < give_up_s:
        if process.poll() is not None:
            raise PeerError(f"it ended with {process.returncode}: see {log}")
        try:
            with urllib.request.urlopen(url, timeout=5.0):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise PeerError(f"it was not ready within {START_LIMIT_S:g} s: see {log}")
