"""python -m benchmarks.gpu: all parts one after another, their tables written after each. `run.sh` starts it with the right paths.

A part that fails or hangs, or for which no time is left, is named in the report, and the others run. Exit code 1 if one of ours
did, or if a result was not right. First what the service runs, right and fast; then what it may run.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from benchmarks.gpu.report import Report
from benchmarks.tables import commit

if TYPE_CHECKING:
    import torch

    from benchmarks.gpu.shapes import Scale
    from benchmarks.gpu.table import Table

RESULTS = Path(__file__).parent / "results"
# At most, for one part: kernels that were compiled never before among it.
_PART_S = 150.0


def main() -> int:
    arguments = parse()
    if arguments.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    import torch

    if arguments.device == "cpu":
        torch.set_num_threads(1)

    from benchmarks.gpu import correctness
    from benchmarks.gpu.shapes import FULL, SMOKE

    device = numbered(arguments.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    scale = SMOKE if arguments.tiny else FULL
    report = begin(arguments, device)
    report.part("attention", lambda: correctness.attention(scale, device))
    report.part("small model", lambda: correctness.small_model(scale, device))
    report.part("draws", lambda: correctness.draws(scale, device))
    report.part("several steps", lambda: correctness.several_steps(scale, device))
    if arguments.model:
        report.part("checkpoint", lambda: correctness.checkpoint(arguments.model, scale, device))
    speed(report, scale, device)
    gc.collect()  # the model
    if device.type == "cuda":
        torch.cuda.empty_cache()
    report.part("transformers", lambda: peer(scale, device, min(_PART_S - 10.0, report.left_s())), required=False)
    print(f"written to {report.path}.md and .json")
    return 1 if report.failed or any(table.wrong for table in report.tables) else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks/gpu/run.sh", description=__doc__)
    parser.add_argument("--device", default="cuda", help="cuda, or cpu with --tiny")
    parser.add_argument("--tiny", action="store_true", help="small shapes: that everything runs")
    parser.add_argument("--model", help="a GGUF file or Hugging Face folder to compare with the CPU too")
    parser.add_argument("--budget-s", type=float, default=450.0, help="parts that would begin later are left out")
    parser.add_argument("--resume", type=float, metavar="DEADLINE_S", help=argparse.SUPPRESS)
    parser.add_argument("--stem", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or RESULTS), help="folder for the results")
    arguments = parser.parse_args()
    if arguments.device == "cpu" and not arguments.tiny:
        parser.error("--device cpu is for --tiny alone: the kernels are interpreted there")
    return arguments


def numbered(name: str) -> torch.device:
    """As in service: where a capture fails torch's allocator has to be told what device it was on, by number."""
    import torch

    device = torch.device(name)
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def begin(arguments: argparse.Namespace, device: torch.device) -> Report:
    """A new report, or that of the process which this one takes over from."""
    import torch
    import triton
    from tokenmill_executor.model.device import is_lost

    now = datetime.now(UTC)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({platform.machine()}), Triton interpreted"
    software = f"torch {torch.__version__}, Triton {triton.__version__}, Python {platform.python_version()}"
    title = f"The executor on {name}, {now:%Y-%m-%d %H:%M} UTC, commit {commit()}; {software}"
    arguments.out.mkdir(parents=True, exist_ok=True)
    kind = "tiny" if arguments.tiny else "8b"
    stem = arguments.stem or f"{now:%Y-%m-%d}-{kind}-{name.split('(')[0].strip().lower().replace(' ', '-')}"
    deadline_s = arguments.resume or time.monotonic() + arguments.budget_s

    def take_over() -> NoReturn:
        command = [sys.executable, "-m", "benchmarks.gpu", *sys.argv[1:], "--resume", str(deadline_s), "--stem", stem]
        os.execv(command[0], command)

    report = Report(arguments.out / stem, title, deadline_s, _PART_S, lambda: is_lost(device), take_over)
    if arguments.resume:
        report.resume()
    print(f"# {report.title}\n", flush=True)
    return report


def speed(report: Report, scale: Scale, device: torch.device) -> None:
    """Parts on one engine, then those that may be left out when time runs short.

    What they share is made again by a process that takes over.
    """
    from benchmarks.gpu import correctness, kernels, profiles
    from benchmarks.gpu import speed as parts
    from benchmarks.gpu.once import Once
    from benchmarks.gpu.shapes import make_executor

    dtype = scale.dtypes[-1]
    bounds = Once(lambda: parts.measure_bounds(scale, dtype, device))
    executor = Once(lambda: make_executor(scale, dtype, device))
    report.part("device", lambda: parts.bounds_table(scale, dtype, bounds()))
    report.part("start", lambda: parts.start(executor))
    report.part("decode", lambda: parts.decode(scale, executor(), bounds()))
    report.part("prefill", lambda: parts.prefill(scale, executor(), bounds()))
    report.part("burst", lambda: parts.burst(scale, executor()))
    report.part("products", lambda: kernels.products(scale, dtype, device, bounds()))
    report.part("drawing", lambda: kernels.draws(scale, device))
    report.part("caches", lambda: kernels.caches(scale, dtype, device, bounds()))
    report.part("tilings", lambda: kernels.tilings(scale, dtype, device, bounds()))
    report.part("quantised caches", lambda: correctness.quantised_caches(scale, device))
    report.part("quantised weights", lambda: correctness.quantised_weights(scale, device))
    # Last, for on some virtual machines a profiler fails in ways that end the process.
    for batch in scale.profiled_batches:
        report.part(f"profile of {batch}", lambda batch=batch: profiles.decode(scale, executor(), batch))  # type: ignore[misc]
    report.part("profile of prefill", lambda: profiles.prefill(scale, executor()))


def peer(scale: Scale, device: torch.device, timeout_s: float) -> Table:
    from benchmarks.gpu.shapes import FULL
    from benchmarks.gpu.table import Table

    command = [sys.executable, "-m", "benchmarks.gpu.peer", str(device), *(() if scale is FULL else ("--tiny",))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-500:])
    version, rate = done.stdout.split()[-2:]
    title = f"The same {scale.requests} requests in transformers' continuous batching"
    return Table(title, ("what", "output tokens/s"), [(f"transformers {version}", float(rate))])


if __name__ == "__main__":
    sys.exit(main())
