"""The GPU benchmark, run whole on small shapes, so that it works on the day there is a GPU."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from benchmarks.gpu.__main__ import numbered
from benchmarks.gpu.once import Once
from benchmarks.gpu.peer import rounds
from benchmarks.gpu.report import Report
from benchmarks.gpu.shapes import FULL, SMOKE, Scale
from benchmarks.gpu.table import Table

ROOT = Path(__file__).resolve().parents[3]


def test_the_one_command_runs_end_to_end_and_keeps_its_tables(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHON": sys.executable, "OUT": str(tmp_path)}
    command = [str(ROOT / "benchmarks/gpu/run.sh"), "--device", "cpu", "--tiny"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    (results,) = tmp_path.glob("*.json")
    report = json.loads(results.read_text())
    assert report["left_out"] == []
    titles = [table["title"].split(",")[0] for table in report["tables"]]
    assert titles[:2] == ["Attention against the reference", "A small random model against the CPU"]
    assert titles[2:5] == ["Drawn tokens against torch's", "Several steps in one plan are single steps", "The device"]
    assert titles[5:9] == ["Start", "Decode", "Prefill of 40 tokens", "2 requests at once"]
    assert titles[-5:-3] == ["Quantised caches", "Products of quantised weights"]
    assert titles[-3:-1] == ["Kernels of a decode step of 2", "Kernels of a prefill of 40"]
    assert titles[-1] == "The same 2 requests in transformers' continuous batching"
    assert not any(table["wrong"] for table in report["tables"])
    text = results.with_suffix(".md").read_text()
    assert all(table["title"] in text for table in report["tables"])


@pytest.mark.parametrize("scale", [FULL, SMOKE], ids=["full", "smoke"])
def test_no_prompt_begins_as_one_that_the_other_server_has_been_warmed_up_with(scale: Scale) -> None:
    """transformers finds blocks of such in its prefix cache, from one call to the next; the engine that it is beside has none."""
    warm_up, measured = rounds(scale)
    assert len(warm_up) == len(measured) == scale.requests
    assert len({prompt[0] for prompt in (*warm_up, *measured)}) == 2 * scale.requests


def test_a_device_has_its_number_also_where_none_is_given() -> None:
    assert [numbered(name) for name in ("cpu", "cuda", "cuda:1")] == [
        torch.device("cpu"),
        torch.device("cuda", 0),
        torch.device("cuda", 1),
    ]


def _part(name: str) -> Table:
    return Table(name, ("what", "value"), [("x", 1.5), ("right", True)])


def _broken() -> Table:
    raise ValueError("an illegal memory access")


def _parts(path: Path, *options: str) -> None:
    """As the benchmark has them, with a part after which the device is lost and one that never ends."""

    def take_over() -> NoReturn:
        os.execv(sys.executable, [sys.executable, __file__, str(path), "resume"])

    report = Report(path, "Title", time.monotonic() + 60.0, 1.0, lambda: True, take_over)
    if options:
        report.resume()
    report.part("first", lambda: _part("first"))
    report.part("broken", _broken)
    report.part("second", lambda: _part("second"))
    report.part("stuck", lambda: _part(str(threading.Event().wait())), required=False)
    report.part("third", lambda: _part("third"))


def test_a_lost_device_and_a_part_that_hangs_cost_one_part_each(tmp_path: Path) -> None:
    """A new process goes on behind it, with all that was found before."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, __file__, str(tmp_path / "report")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "report.json").read_text())
    assert [table["title"] for table in found["tables"]] == ["first", "second", "third"]
    assert found["left_out"] == ["broken: ValueError: an illegal memory access", "stuck: had not ended after 1 s"]
    assert found["failed"]
    assert "| x | 1.5 |\n| right | yes |" in (tmp_path / "report.md").read_text()


def test_what_several_parts_share_is_made_once_and_failed_once() -> None:
    numbers = itertools.count()
    made = Once(lambda: next(numbers))
    assert (made(), made()) == (0, 0)
    broken = Once(_broken)
    with pytest.raises(ValueError, match="illegal"):
        broken()
    with pytest.raises(RuntimeError, match="as before: an illegal"):
        broken()


if __name__ == "__main__":
    _parts(Path(sys.argv[1]), *sys.argv[2:])
