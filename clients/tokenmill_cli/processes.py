"""The services as child processes: started, waited for, stopped. Must not know: what they do.

Each child has a process group of its own, so that Ctrl-C reaches this process alone, which then stops them in order.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

from tokenmill_cli.exits import CommandError, ExitCode

_START_LIMIT_S = 300.0
# The services give running work 30 s on SIGTERM.
_STOP_LIMIT_S = 40.0

# Of each service a package that the plain install does not have, and what brings it.
_NEEDS = {
    "tokenmill_scheduler": ("sqlalchemy", "pip install 'tokenmill[scheduler]'"),
    "tokenmill_executor": (
        "structlog",
        "pip install 'tokenmill[executor]', or for --model simulated alone 'tokenmill[executor-base]'",
    ),
}


def check_installed(module: str) -> None:
    """Raises CommandError when the service's packages are missing."""
    package, install = _NEEDS.get(module, (module, ""))
    if importlib.util.find_spec(package) is None:
        raise CommandError(f"{module} needs packages that are not installed: {install}.")


class Service:
    """One running service. `on_line` is called with each line it writes, from a thread."""

    def __init__(self, name: str, module: str, flags: Sequence[str], folder: Path, on_line: Callable[[str], None]) -> None:
        """`folder` is for the file in which the service says where it listens."""
        check_installed(module)
        self.name = name
        self._port_file = folder / f"{name}.address"
        self._port_file.unlink(missing_ok=True)
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *flags, "--port-file", str(self._port_file)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            process_group=0,
        )
        self._on_line = on_line
        self._reader = threading.Thread(target=self._read, name=f"{name}-log", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._on_line(line.rstrip("\n"))

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; a signal's death as shells say it."""
        code = self._process.poll()
        return 128 - code if code is not None and code < 0 else code

    def address(self) -> str:
        """Where it listens, once it does. Raises CommandError when it ends first."""
        deadline_s = time.monotonic() + _START_LIMIT_S
        while time.monotonic() < deadline_s:
            if self._port_file.exists() and (address := self._port_file.read_text().strip()):
                return address
            if self.exit_code is not None:
                self._reader.join()
                message = f"The {self.name} ended with code {self.exit_code} before it was ready: see its log above."
                raise CommandError(message, self.exit_code or ExitCode.FAILURE)
            time.sleep(0.05)
        raise CommandError(f"The {self.name} was not ready within {_START_LIMIT_S:g} s: see its log above.")

    def wait(self) -> int:
        """Until it ends by itself, its last lines read."""
        self._process.wait()
        self._reader.join()
        assert self.exit_code is not None
        return self.exit_code

    def terminate(self) -> None:
        if self.exit_code is None:
            self._process.terminate()

    def stop(self) -> int:
        """SIGTERM, and SIGKILL if that is of no use or the user presses Ctrl-C once more."""
        self.terminate()
        try:
            self._process.wait(_STOP_LIMIT_S)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            self._process.kill()
        return self.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()
