"""Compiles `csrc/` into one shared library per instruction set: when the package is installed (hatch_build.py), or by hand:

    python -m tokenmill_executor.cpu.build [a compiler's FLAG …]

Standard library only, and no import of its own package: the build hook runs this file by its path. Both libraries are
always made, so that a wheel serves processors with AVX512 (BF16, VNNI) and with AVX2.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = HERE / "csrc"
# Best first. gcc keeps IEEE rules for what is not a number: the kernels rely on them to let it through.
INSTRUCTION_SETS = {
    "avx512": ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni"),
    "avx2": ("-march=x86-64-v3",),
}
FLAGS = ("-std=c++20", "-O3", "-fno-math-errno", "-fno-trapping-math", "-pthread", "-fPIC", "-shared", "-fvisibility=hidden", "-g1")


class BuildFailed(RuntimeError):
    """The kernels cannot be compiled here. Its text is one sentence that says why."""


def library_path(instruction_set: str) -> Path:
    return HERE / f"_kernels_{instruction_set}.so"


def build(extra_flags: tuple[str, ...] = ()) -> list[Path]:
    """Compiles what is older than its sources; returns the libraries. Raises BuildFailed."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        raise BuildFailed(f"the kernels are for Linux on x86-64, not {sys.platform} on {platform.machine()}")
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise BuildFailed("there is no g++ (set CXX to another compiler)")
    newest_source = max(file.stat().st_mtime for file in (*SOURCES.iterdir(), Path(__file__)))
    libraries = {name: library_path(name) for name in INSTRUCTION_SETS}

    def compile_if_older(name: str) -> None:
        library = libraries[name]
        if not library.exists() or library.stat().st_mtime < newest_source or extra_flags:
            _compile(compiler, (*FLAGS, *INSTRUCTION_SETS[name], *extra_flags), library)

    # Side by side: each takes one processor half a minute.
    with ThreadPoolExecutor(len(libraries)) as compilers:
        list(compilers.map(compile_if_older, libraries))
    return list(libraries.values())


def _compile(compiler: str, flags: tuple[str, ...], library: Path) -> None:
    unfinished = library.with_suffix(f".{os.getpid()}.tmp")
    sources = sorted(str(file) for file in SOURCES.glob("*.cpp"))
    result = subprocess.run([compiler, *flags, "-o", str(unfinished), *sources], capture_output=True, text=True, check=False)
    if result.returncode:
        unfinished.unlink(missing_ok=True)
        raise BuildFailed(f"{compiler} failed: {result.stderr.strip()[-2000:]}")
    # In one move: a process may have the old one mapped, and another may be building too.
    unfinished.replace(library)


if __name__ == "__main__":
    try:
        print(*build(tuple(sys.argv[1:])), sep="\n")
    except BuildFailed as failure:
        sys.exit(f"The CPU kernels were not built: {failure}.")
