"""The GPU benchmark, run whole on small shapes, so that it works on the day there is a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_the_one_command_runs_end_to_end_and_keeps_its_tables(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHON": sys.executable, "OUT": str(tmp_path)}
    command = [str(ROOT / "benchmarks/gpu/run.sh"), "--device", "cpu", "--tiny"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    (results,) = tmp_path.glob("*.json")
    report = json.loads(results.read_text())
    assert report["left_out"] == []
    titles = [table["title"].split(",")[0] for table in report["tables"]]
    assert titles[:2] == ["Attention against the reference", "A small random model against the CPU"]
    assert titles[2:5] == ["Drawn tokens against torch's", "Several steps in one plan are single steps", "The device"]
    assert titles[5:8] == ["Decode", "Prefill of 40 tokens", "2 requests at once"]
    assert not any(table["wrong"] for table in report["tables"])
    text = results.with_suffix(".md").read_text()
    assert all(table["title"] in text for table in report["tables"])
