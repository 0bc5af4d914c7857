"""`tokenmill top` against a running service: into a pipe, as JSON, and on a terminal until Ctrl-C."""

from __future__ import annotations

import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from fcntl import ioctl

from tokenmill_client import Client

from tests.e2e.commands import TIMEOUT_S, tokenmill
from tests.fakes.processes import Processes


@contextmanager
def on_a_terminal(*argv: str, lines: int = 30, columns: int = 100) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """The command, and the descriptor of what it writes."""
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    command = [sys.executable, "-m", "tokenmill_cli.main", *argv]
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env={**environment, "TERM": "xterm"})
    os.close(theirs)
    try:
        yield process, ours
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def test_top_shows_a_frame_a_document_and_a_screen_that_lives(processes: Processes) -> None:
    scheduler = processes.scheduler(processes.executor(name="watched").address)
    with Client(scheduler.address) as client:
        client.wait_ready()
    generated = tokenmill("--server", scheduler.address, "generate", "hello", "--max-tokens", "20")
    assert generated.returncode == 0, generated.stderr

    once = tokenmill("--server", scheduler.address, "top", "--once", "--interval", "0.1")
    assert once.returncode == 0, once.stderr
    for words in ("fcfs, continuous batching", "batch occupancy", "standard", "watched", "ended 1 length"):
        assert words in once.stdout
    assert "\x1b" not in once.stdout, "no colours into a pipe"

    document = json.loads(tokenmill("--server", scheduler.address, "--json", "top", "--once").stdout)
    assert document["load"]["output_tokens"] == 20
    assert sum(document["load"]["time_to_first_token"]["counts"]) == 1
    assert document["executors"][0]["name"] == "watched"

    with on_a_terminal("--server", scheduler.address, "top", "--interval", "0.05") as (process, screen):
        seen = b""
        while seen.count(b"time to first token") < 3:
            seen += os.read(screen, 65_536)
        process.send_signal(signal.SIGINT)
        while b"\x1b[?1049l" not in seen:
            seen += os.read(screen, 65_536)
        assert process.wait(TIMEOUT_S) == 130
