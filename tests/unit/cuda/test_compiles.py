"""The kernels are compiled for Hopper, which needs no GPU: what the interpreter lets pass and a compiler does not shows here.

In a process of its own, since Triton decides on import whether it interprets.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("compile_kernels.py")


def test_all_kernels_compile_for_hopper_without_spilling(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, str(SCRIPT)], env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    report = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert len(report) == 17
    assert all("stack=0" in numbers for numbers in report.values()), done.stdout
    # The tensor cores' instructions: of a warp for a few rows, of a warp group for many.
    assert "mma" in report["decode"]
    assert "wgmma" in report["chunk"]
