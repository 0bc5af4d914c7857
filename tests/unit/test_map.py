"""The scheduler's map of its files, in its package's docstring, names each of them and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import tokenmill_scheduler


def test_the_map_names_every_file() -> None:
    folder = Path(str(tokenmill_scheduler.__file__)).parent
    files = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    folders = {path.parent.name for path in folder.glob("*/__init__.py")}
    words = tokenmill_scheduler.__doc__ or ""
    assert set(re.findall(r"`(\w+)`", words)) == files
    assert set(re.findall(r"(\w+)/", words)) == folders
