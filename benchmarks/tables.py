"""Where tables are kept, by the day on which they were measured, and of what code. Must not know: what is in them."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path

from tokenmill_executor.cpu.library import best_instruction_set, first_processor, processor_flags

_RESULTS = Path(__file__).parent / "results"


def today() -> str:
    return f"{datetime.now(UTC):%Y-%m-%d}"


def commit() -> str:
    """Of the working tree, or what COMMIT says where there is no repository."""
    try:
        done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    except OSError:  # no git either
        return os.environ.get("COMMIT", "unknown")
    return done.stdout.strip() or os.environ.get("COMMIT", "unknown")


def processor() -> str:
    """Its name, and the instruction set that the CPU kernels have of it."""
    first = first_processor()
    name, instruction_set = first.get("model name", platform.machine()), best_instruction_set(processor_flags(first))
    return name if instruction_set is None else f"{name}, {instruction_set.upper()}"


def table_path(name: str) -> Path:
    return _RESULTS / f"{today()}-{name}.md"


def keep(name: str, table: str) -> None:
    """Shows it, and writes it in place of the one that was measured before on the same day."""
    print(table)
    table_path(name).write_text(table, encoding="utf-8")
