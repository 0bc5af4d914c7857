"""Each trace's outcomes are as they were when somebody last read them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.golden.trace import TRACES, render

_PATHS = sorted(TRACES.glob("*.txt"))


def test_there_are_traces() -> None:
    assert len(_PATHS) >= 12


@pytest.mark.parametrize("path", _PATHS, ids=lambda path: path.stem)
def test_trace(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert render(text) == text, "outcomes changed; `python -m tests.golden.trace` writes them anew: read the difference"
