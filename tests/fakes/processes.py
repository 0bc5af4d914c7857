"""Service processes for tests: started, stopped, killed, and never left behind.

    with Processes() as processes:
        executor = processes.executor("--simulated-step-ms", "2")
        scheduler = processes.scheduler(executor.address)
        scheduler.kill()
        scheduler = processes.scheduler(executor.address)  # same address, same database

Each listens on a unix socket in a folder of its own, so that one started again is found where the last one was.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 30.0
# Flags for metrics at any port that is free.
METRICS = ("--metrics-address", "127.0.0.1:0")


class ServiceProcess:
    """`python -m module ...`, listening at `address`; its log is the file `log`."""

    def __init__(self, module: str, flags: list[str], folder: Path, name: str) -> None:
        self.name = name
        self.address = f"unix:{folder / name}.sock"
        self.log = folder / f"{name}.log"
        self._port_file = folder / f"{name}.address"
        self._port_file.unlink(missing_ok=True)
        command = [sys.executable, "-m", module, "--listen", self.address, "--port-file", str(self._port_file), *flags]
        with self.log.open("a") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder, env=_environment())

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_until_listening(self) -> None:
        """Raises AssertionError with its log when it ends or takes too long."""
        give_up_s = time.monotonic() + START_TIMEOUT_S
        while not self._port_file.exists():
            assert self._process.poll() is None, f"{self.name} ended with {self._process.returncode}:\n{self.log.read_text()}"
            assert time.monotonic() < give_up_s, f"{self.name} does not listen:\n{self.log.read_text()}"
            time.sleep(0.01)

    @property
    def metrics_address(self) -> str:
        """Where it tells of itself, if it was started with METRICS: it said so in its log before it listened."""
        addresses: list[str] = re.findall(r"metrics served.* address=(\S+)", self.log.read_text())
        return addresses[-1]

    def kill(self) -> None:
        """SIGKILL: it has no time for last words."""
        self._process.kill()
        self._process.wait(STOP_TIMEOUT_S)

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def wait(self) -> int:
        """Its exit code, once it ends."""
        return self._process.wait(STOP_TIMEOUT_S)

    def stop(self) -> int:
        """SIGTERM; returns the exit code."""
        self.signal(signal.SIGTERM)
        return self.wait()

    @property
    def runs(self) -> bool:
        return self._process.poll() is None


class Processes:
    """All processes of one test and the folder they share; leaving the context kills what still runs."""

    def __init__(self) -> None:
        # Not pytest's folder: the path of a unix socket has at most 107 characters.
        self.folder = Path(tempfile.mkdtemp(prefix="tm-"))
        self._started: list[ServiceProcess] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        for process in self._started:
            if process.runs:
                process.signal(signal.SIGCONT)
                process.kill()
            if kind is not None:
                print(f"---- {process.name} ----\n{process.log.read_text()[-20_000:]}")
        shutil.rmtree(self.folder, ignore_errors=True)

    def executor(self, *flags: str, name: str = "executor") -> ServiceProcess:
        """A simulated executor that takes almost no time a step; flags given here win. Returns once it listens."""
        fast = ["--simulated-step-ms", "1", "--simulated-prefill-token-us", "0", "--simulated-decode-token-us", "0"]
        return self._start("tokenmill_executor", ["--model", "simulated", "--name", name, *fast, *flags], name)

    def scheduler(
        self, *executor_addresses: str, flags: tuple[str, ...] = (), name: str = "scheduler", database: str = ""
    ) -> ServiceProcess:
        """Its database is a file in the folder, named as it is, unless given. Returns once it listens, maybe not yet ready."""
        executors = [part for address in executor_addresses for part in ("--executor", address)]
        database = database or f"sqlite:///{self.folder / name}.db"
        return self._start("tokenmill_scheduler", ["--database", database, *executors, *flags], name)

    def _start(self, module: str, flags: list[str], name: str) -> ServiceProcess:
        process = ServiceProcess(module, flags, self.folder, name)
        self._started.append(process)
        process.wait_until_listening()
        return process


async def wait_serving(address: str, service: str = "", serving: bool = True) -> None:
    """Returns once the service's health is SERVING, or is not when `serving` is False."""
    async with grpc.aio.insecure_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        async for response in health_pb2_grpc.HealthStub(channel).Watch(request, wait_for_ready=True, timeout=START_TIMEOUT_S):
            if (response.status == health_pb2.HealthCheckResponse.SERVING) is serving:
                return


def _environment() -> dict[str, str]:
    """Without settings of whoever runs the tests, and one thread each: tests share few cores."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TOKENMILL_")}
    return {**inherited, "OMP_NUM_THREADS": "1"}
