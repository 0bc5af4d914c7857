"""The kernels are compiled for Hopper, which needs no GPU: what the interpreter lets pass and a compiler does not shows here.

And they are launched as far as Triton's own code around a kernel goes, which the interpreter leaves out. In processes of their own,
since Triton decides on import whether it interprets.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def run(script: str, cache: Path) -> list[str]:
    paths = [str(HERE.parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache), "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run([sys.executable, str(HERE / script)], env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_all_kernels_compile_for_hopper_without_spilling(tmp_path: Path) -> None:
    lines = run("compile_kernels.py", tmp_path)
    report = dict(line.split(maxsplit=1) for line in lines)
    assert len(report) == 17
    assert all("stack=0" in numbers for numbers in report.values()), lines
    # The tensor cores' instructions: of a warp for a few rows, of a warp group for many.
    assert "mma" in report["decode"]
    assert "wgmma" in report["chunk"]


def test_all_that_service_launches_is_compiled_at_the_start(tmp_path: Path) -> None:
    """A compilation takes seconds, in which every stream waits."""
    told = [line for line in run("launches.py", tmp_path) if line.startswith(("at start: ", "late: "))]
    assert [line.split()[:3] for line in told] == [["at", "start:", name] for name in ("llama", "qwen3-int8", "gemma3")]
