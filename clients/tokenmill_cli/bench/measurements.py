"""A measurement: what was sent where, and every run's times; kept as a JSON file that later commands compare and draw."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tokenmill_cli.bench.runner import RequestTiming, WorkloadRun
from tokenmill_cli.exits import CommandError, ExitCode

_FORMAT = "tokenmill-bench-1"
_DECIMALS = 6


@dataclass(frozen=True, slots=True)
class Measurement:
    """`label` names it in comparisons. `rate` is in requests a second, None when requests came as the workload has them."""

    label: str
    target: str
    model: str
    workload: str
    rate: float | None
    seed: int
    started_at: str
    machine: str
    runs: tuple[WorkloadRun, ...]


def machine() -> str:
    return f"{os.cpu_count()} cores ({platform.machine()}), Python {platform.python_version()}"


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def save(measurement: Measurement, path: Path) -> None:
    """Raises CommandError when the file cannot be written."""
    document = {"format": _FORMAT, **_rounded(asdict(measurement))}
    try:
        path.write_text(json.dumps(document, separators=(",", ":")) + "\n", encoding="utf-8")
    except OSError as error:
        raise CommandError(f"{path} cannot be written: {error.strerror}.") from error


def read(path: Path) -> Measurement:
    """Raises CommandError when it cannot be read, or is none."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document.pop("format") != _FORMAT:
            raise ValueError("of another format")
        runs = tuple(_run(run) for run in document.pop("runs"))
        return Measurement(**document, runs=runs)
    except OSError as error:
        raise CommandError(f"{path} cannot be read: {error.strerror}.", ExitCode.USAGE) from error
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise CommandError(f"{path} is not what `tokenmill bench --save` writes: {error}.", ExitCode.USAGE) from error


def _run(document: Mapping[str, Any]) -> WorkloadRun:
    timings = tuple(
        RequestTiming(**{**timing, "token_times_s": tuple(timing["token_times_s"]), "token_counts": tuple(timing["token_counts"])})
        for timing in document["timings"]
    )
    occupancy = tuple((at_s, running) for at_s, running in document["occupancy"])
    return WorkloadRun(**{**document, "timings": timings, "occupancy": occupancy, "failures": tuple(document["failures"])})


def _rounded(value: Any) -> Any:
    """Microseconds are as fine as clocks tell."""
    if isinstance(value, float):
        return round(value, _DECIMALS)
    if isinstance(value, Mapping):
        return {name: _rounded(part) for name, part in value.items()}
    return [_rounded(part) for part in value] if isinstance(value, Sequence) and not isinstance(value, str) else value
