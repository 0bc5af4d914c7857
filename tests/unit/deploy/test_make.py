"""What the Makefile does beside calling tools."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from tokenmill_executor.cpu.build import HERE, INSTRUCTION_SETS, library_path

_ROOT = Path(__file__).parents[3]


def test_clean_takes_the_compiled_kernels_away_and_no_source(tmp_path: Path) -> None:
    shutil.copy(_ROOT / "Makefile", tmp_path)
    folder = tmp_path / HERE.relative_to(_ROOT)
    folder.mkdir(parents=True)
    for name in ("library.py", *[library_path(each).name for each in INSTRUCTION_SETS]):
        (folder / name).touch()
    subprocess.run(["make", "clean"], cwd=tmp_path, check=True, capture_output=True)
    assert [file.name for file in folder.iterdir()] == ["library.py"]
