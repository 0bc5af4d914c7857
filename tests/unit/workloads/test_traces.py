"""Trace files of every kind, and what is wrong with one."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from tokenmill_workloads import Arrival, Columns, TraceError, read_trace

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens\r
2023-11-16 18:15:46.6805900,374,44\r
2023-11-16 18:15:50.9951690,396,109\r
"""
MOONCAKE = """{"timestamp": 0, "input_length": 600, "output_length": 500, "hash_ids": [0, 1]}
{"timestamp": 3000, "input_length": 90, "output_length": 7, "hash_ids": [0]}
"""


def written(folder: Path, content: str | bytes, compressed: bool = False) -> Path:
    data = content.encode() if isinstance(content, str) else content
    path = folder / "trace"
    path.write_bytes(gzip.compress(data) if compressed else data)
    return path


@pytest.mark.parametrize("compressed", [False, True])
def test_formats_are_recognised(tmp_path: Path, compressed: bool) -> None:
    (first, second) = read_trace(written(tmp_path, AZURE, compressed))
    assert first == Arrival(0.0, 374, 44)
    assert (second.prompt_tokens, second.output_tokens) == (396, 109)
    assert second.at_s == pytest.approx(4.314579, abs=1e-5)
    assert read_trace(written(tmp_path, MOONCAKE, compressed)) == (Arrival(0.0, 600, 500, (0, 1)), Arrival(3.0, 90, 7, (0,)))


def test_columns_are_named(tmp_path: Path) -> None:
    columns = Columns("t", "in", "out", time_unit_s=60.0)
    assert read_trace(written(tmp_path, "out,in,t\n3,2,5\n4,1,4.5\n"), columns) == (Arrival(0.0, 1, 4), Arrival(30.0, 2, 3))
    lines = '{"t": "2026-01-01T00:00:00Z", "in": 5, "out": 6}\n{"t": "2026-01-01T01:00:02+01:00", "in": 7, "out": 8}\n'
    assert read_trace(written(tmp_path, lines), columns) == (Arrival(0.0, 5, 6), Arrival(2.0, 7, 8))


def test_only_the_first_are_read(tmp_path: Path) -> None:
    assert len(read_trace(written(tmp_path, MOONCAKE + "broken"), limit=2)) == 2
    assert read_trace(written(tmp_path, "")) == ()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a,b\n1,2\n", "no trace format has the columns a, b"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,374\n", "line 2: "),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,374,1\n", "line 2: .*yesterday"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nnan,374,1\n", "line 2: a request at nan"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n1,0,1\n", "line 2: a request of 0 tokens"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n1,many,1\n", "line 2: 'many' is no number of tokens"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n1,2\n", "line 2: None is no number of tokens"),
        (MOONCAKE + "{", "line 3: "),
        (MOONCAKE + '{"timestamp": 5}', "line 3: there is no column 'input_length', but timestamp"),
        (MOONCAKE + "[]", "line 3: not an object"),
        (b"\xff\xfe\x00", "neither text nor gzipped text"),
        (gzip.compress(AZURE.encode())[:-20], "neither text nor gzipped text"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(tmp_path: Path, content: str | bytes, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        read_trace(written(tmp_path, content))
