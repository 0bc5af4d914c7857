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
def on_a_terminal(*argv: str, has_keys: bool = True) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """The command, and the descriptor of what it writes and, unless its standard input is no terminal, of what it reads."""
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    command = [sys.executable, "-m", "tokenmill_cli.main", *argv]
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    source = theirs if has_keys else subprocess.DEVNULL
    process = subprocess.Popen(command, stdin=source, stdout=theirs, stderr=theirs, env={**environment, "TERM": "xterm"})
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

    with on_a_terminal("--server", scheduler.address, "top", "--interval", "30") as (process, screen):
        seen = b""
        while b"time to first token" not in seen:
            seen += os.read(screen, 65_536)
        for key, told in ((b"s", b"by tokens"), (b"l", b"lane real_time"), (b"p", b"go on"), (b"?", b"Any other key goes back")):
            os.write(screen, key)
            while told not in seen:
                seen += os.read(screen, 65_536)
        os.write(screen, b"q")
        while b"\x1b[?1049l" not in seen:
            seen += os.read(screen, 65_536)
        assert process.wait(TIMEOUT_S) == 0


def test_top_needs_no_terminal_to_read_from(processes: Processes) -> None:
    scheduler = processes.scheduler(processes.executor().address)
    with on_a_terminal("--server", scheduler.address, "top", "--interval", "0.05", has_keys=False) as (process, screen):
        seen = b""
        while seen.count(b"time to first token") < 3:
            seen += os.read(screen, 65_536)
        process.send_signal(signal.SIGINT)
        assert process.wait(TIMEOUT_S) == 130
