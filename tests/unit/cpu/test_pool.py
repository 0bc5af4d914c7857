"""The threads of a step, by themselves: a program in C++ that stops some of them where it hurts."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from tokenmill_executor.cpu.build import SOURCES

PROGRAM = Path(__file__).with_name("pool_test.cpp")


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_a_step_never_waits_for_a_thread_that_does_not_run(tmp_path: Path) -> None:
    program = tmp_path / "pool_test"
    flags = ["-std=c++20", "-O2", "-Wall", "-Wextra", "-Werror", "-pthread", f"-I{SOURCES}"]
    subprocess.run(["g++", *flags, "-o", program, PROGRAM, SOURCES / "pool.cpp"], check=True)
    # Where a stopped thread's work is left with it, the program waits for itself.
    subprocess.run([program], check=True, timeout=120)
