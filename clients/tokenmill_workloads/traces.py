"""Recorded request traces, CSV or JSON lines, plain or gzipped, as arrivals.

Recognised by their columns: the Azure LLM inference traces (Patel et al., "Splitwise", ISCA 2024) and the Mooncake traces (Qin et
al., "Mooncake", FAST 2025). Any other file is read with the names of its columns given.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

from tokenmill_workloads.arrivals import Arrival

_GZIP = b"\x1f\x8b"


class TraceError(ValueError):
    """The file is no trace, or not as its columns promise; says which line."""


@dataclass(frozen=True, slots=True)
class Columns:
    """Names of a trace's columns. Times are dates (ISO 8601) or numbers of `time_unit_s` seconds; `hash_ids` may be missing."""

    at: str
    prompt_tokens: str
    output_tokens: str
    time_unit_s: float = 1.0
    hash_ids: str = ""


AZURE = Columns("TIMESTAMP", "ContextTokens", "GeneratedTokens")
MOONCAKE = Columns("timestamp", "input_length", "output_length", time_unit_s=1e-3, hash_ids="hash_ids")
_KNOWN = (AZURE, MOONCAKE)


def read_trace(path: Path, columns: Columns | None = None, limit: int | None = None) -> tuple[Arrival, ...]:
    """Its requests, at most the first `limit`, in the order of their times; the first comes at 0 s.

    Raises TraceError when it is not what it should be, OSError when it cannot be read.
    """
    with path.open("rb") as file:
        compressed = file.read(len(_GZIP)) == _GZIP
    open_bytes = gzip.open if compressed else open
    try:
        with open_bytes(path, "rb") as content, io.TextIOWrapper(content, encoding="utf-8-sig", newline="") as text:
            arrivals = list(islice(_arrivals(text, columns), limit))
    except (UnicodeDecodeError, EOFError, gzip.BadGzipFile) as error:
        raise TraceError(f"{path} is neither text nor gzipped text: {error}") from error
    except TraceError as error:
        raise TraceError(f"{path}, {error}") from error
    arrivals.sort(key=lambda arrival: arrival.at_s)
    first_s = arrivals[0].at_s if arrivals else 0.0
    return tuple(replace(arrival, at_s=arrival.at_s - first_s) for arrival in arrivals)


def _arrivals(text: Iterable[str], columns: Columns | None) -> Iterator[Arrival]:
    for line, row in _rows(text):
        columns = columns or _recognised(row)
        try:
            yield _arrival(row, columns)
        except KeyError as error:
            raise TraceError(f"line {line}: there is no column {error}, but {', '.join(row)}") from error
        except (TypeError, ValueError) as error:
            raise TraceError(f"line {line}: {error}") from error


def _rows(text: Iterable[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Rows with their line numbers. JSON lines begin with a brace, and no header of a CSV file does."""
    lines = iter(text)
    first = next(lines, "")
    if not first.startswith("{"):
        reader = csv.DictReader(lines, fieldnames=next(csv.reader([first]), []))
        for row in reader:
            yield reader.line_num + 1, row
        return
    for number, line in enumerate([first, *lines], start=1):
        try:
            document = json.loads(line)
        except ValueError as error:
            raise TraceError(f"line {number}: {error}") from error
        if not isinstance(document, dict):
            raise TraceError(f"line {number}: not an object")
        yield number, document


def _recognised(row: Mapping[str, Any]) -> Columns:
    for columns in _KNOWN:
        if {columns.at, columns.prompt_tokens, columns.output_tokens} <= row.keys():
            return columns
    raise TraceError(f"line 1: no trace format has the columns {', '.join(map(str, row))}; say which columns have what")


def _arrival(row: Mapping[str, Any], columns: Columns) -> Arrival:
    return Arrival(
        at_s=_seconds(row[columns.at], columns.time_unit_s),
        prompt_tokens=_tokens(row[columns.prompt_tokens]),
        output_tokens=_tokens(row[columns.output_tokens]),
        hash_ids=tuple(map(int, row.get(columns.hash_ids) or ())),
    )


def _seconds(time: Any, unit_s: float) -> float:
    try:
        seconds = float(time) * unit_s
    except ValueError:
        date = datetime.fromisoformat(time)
        return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()
    if not math.isfinite(seconds):
        raise ValueError(f"a request at {time}")
    return seconds


def _tokens(value: Any) -> int:
    try:
        count = int(value)
    except (TypeError, ValueError):
        raise ValueError(f"{value!r} is no number of tokens") from None
    if count < 1:
        raise ValueError(f"a request of {count} tokens")
    return count
