"""python -m benchmarks.gpu: all parts one after another, their tables written after each. `run.sh` starts it with the right paths.

A part that fails, or for which no time is left, is named in the report, and the others run. Exit code 1 if one of ours did, or if a
result was not right.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from benchmarks.gpu.table import Table

RESULTS = Path(__file__).parent / "results"
# At most, for transformers to load its model and answer the requests twice.
_PEER_S = 150.0


@dataclass(slots=True)
class Report:
    path: Path
    title: str
    deadline_s: float
    tables: list[Table] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    failed: bool = False

    def left_s(self) -> float:
        return self.deadline_s - time.monotonic()

    def part(self, name: str, run: Callable[[], Table], required: bool = True) -> None:
        """Runs a part and keeps its table; says so when there is none, which is a failure if it is required."""
        before = len(self.left_out)
        started_s = time.monotonic()
        if self.left_s() <= 0:
            self.left_out.append(f"{name}: no time was left")
        else:
            try:
                table = run()
                self.tables.append(table)
                print(table.markdown(), flush=True)
            except Exception as error:
                traceback.print_exc()
                self.left_out.append(f"{name}: {type(error).__name__}: {str(error)[:500]}")
        print(f"({name}: {time.monotonic() - started_s:.1f} s, {self.left_s():.0f} s left)\n", flush=True)
        self.failed |= required and len(self.left_out) > before
        self.write()

    def write(self) -> None:
        parts = [f"# {self.title}", "", *(table.markdown() for table in self.tables)]
        if self.left_out:
            parts += ["## Not run", "", *(f"- {line}" for line in self.left_out), ""]
        self.path.with_suffix(".md").write_text("\n".join(parts), encoding="utf-8")
        content = {"title": self.title, "tables": [asdict(table) for table in self.tables], "left_out": self.left_out}
        self.path.with_suffix(".json").write_text(json.dumps(content, indent=1), encoding="utf-8")


def main() -> int:
    arguments = parse()
    if arguments.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    import torch

    if arguments.device == "cpu":
        torch.set_num_threads(1)

    from benchmarks.gpu import correctness
    from benchmarks.gpu.shapes import FULL, SMOKE

    device = torch.device(arguments.device)
    scale = SMOKE if arguments.tiny else FULL
    report = begin(arguments, device)
    report.part("attention", lambda: correctness.attention(scale, device))
    report.part("small model", lambda: correctness.small_model(scale, device))
    report.part("draws", lambda: correctness.draws(scale, device))
    report.part("several steps", lambda: correctness.several_steps(scale, device))
    if arguments.model:
        report.part("checkpoint", lambda: correctness.checkpoint(arguments.model, scale, device))
    report.part("speed", lambda: speed(report, device, arguments.tiny))
    if device.type == "cuda" and not arguments.tiny:
        gc.collect()
        torch.cuda.empty_cache()
        report.part("transformers", lambda: peer(min(_PEER_S, report.left_s())), required=False)
    print(f"written to {report.path}.md and .json")
    return 1 if report.failed or any(table.wrong for table in report.tables) else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks/gpu/run.sh", description=__doc__)
    parser.add_argument("--device", default="cuda", help="cuda, or cpu with --tiny")
    parser.add_argument("--tiny", action="store_true", help="small shapes: that everything runs")
    parser.add_argument("--model", help="a GGUF file or Hugging Face folder to compare with the CPU too")
    parser.add_argument("--budget-s", type=float, default=450.0, help="parts that would begin later are left out")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or RESULTS), help="folder for the results")
    arguments = parser.parse_args()
    if arguments.device == "cpu" and not arguments.tiny:
        parser.error("--device cpu is for --tiny alone: the kernels are interpreted there")
    return arguments


def begin(arguments: argparse.Namespace, device: torch.device) -> Report:
    import torch
    import triton

    now = datetime.now(UTC)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({platform.machine()}), Triton interpreted"
    software = f"torch {torch.__version__}, Triton {triton.__version__}, Python {platform.python_version()}"
    title = f"The executor on {name}, {now:%Y-%m-%d %H:%M} UTC, commit {commit()}; {software}"
    arguments.out.mkdir(parents=True, exist_ok=True)
    stem = f"{now:%Y-%m-%d}-{'tiny' if arguments.tiny else '8b'}-{name.split('(')[0].strip().lower().replace(' ', '-')}"
    print(f"# {title}\n", flush=True)
    return Report(arguments.out / stem, title, time.monotonic() + arguments.budget_s)


def commit() -> str:
    """Of the working tree, or what COMMIT says where there is no repository."""
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or os.environ.get("COMMIT", "unknown")


def speed(report: Report, device: torch.device, tiny: bool) -> Table:
    """Several parts on one engine; returns the table of what took how long to start."""
    from benchmarks.gpu import kernels, profiles
    from benchmarks.gpu import speed as parts
    from benchmarks.gpu.shapes import FULL, SMOKE, make_executor
    from benchmarks.gpu.table import Table

    scale = SMOKE if tiny else FULL
    dtype = scale.dtypes[-1]
    bounds, table = parts.measure_bounds(scale, dtype, device)
    report.tables.append(table)
    print(table.markdown(), flush=True)
    started_s = time.monotonic()
    executor = make_executor(scale, dtype, device)
    made_s = time.monotonic() - started_s
    report.part("decode", lambda: parts.decode(scale, executor, bounds))
    report.part("prefill", lambda: parts.prefill(scale, executor, bounds))
    report.part("burst", lambda: parts.burst(scale, executor))
    for batch in scale.profiled_batches:
        report.part(f"profile of {batch}", lambda batch=batch: profiles.decode(scale, executor, batch))  # type: ignore[misc]
    report.part("profile of prefill", lambda: profiles.prefill(scale, executor))
    report.part("products", lambda: kernels.products(scale, dtype, device, bounds))
    report.part("drawing", lambda: kernels.draws(scale, device))
    report.part("caches", lambda: kernels.caches(scale, dtype, device, bounds))
    report.part("tilings", lambda: kernels.tilings(scale, dtype, device, bounds))
    return Table("Start", ("what", "s"), [("weights, cache, kernels and graphs", made_s)])


def peer(timeout_s: float) -> Table:
    from benchmarks.gpu.shapes import FULL
    from benchmarks.gpu.table import Table

    command = [sys.executable, "-m", "benchmarks.gpu.peer"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-500:])
    title = f"The same {FULL.requests} requests in transformers' continuous batching"
    return Table(title, ("what", "output tokens/s"), [("transformers", float(done.stdout.split()[-1]))])


if __name__ == "__main__":
    sys.exit(main())
