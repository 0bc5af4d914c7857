"""How soon a service that is started answers, and how much memory its executor takes on the way: `tokenmill serve all` on the CPU.

    python -m benchmarks.startup [--model MODEL] [--repeat 3]

Start-up is from the command to the first token at a client that waits until the service is ready; the first start is not counted,
so that the model's file lies in the page cache. Then prompts fill the KV cache, and the executor's peak resident memory (VmHWM),
less libraries, is set beside the bytes of weights (parameters times those of the precision) and KV cache. Libraries are the peak of
a process that imports the executor's server and torch and loads nothing. Writes a table to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from math import prod
from pathlib import Path
from statistics import median

from tokenmill_client import Client
from tokenmill_executor.model.tensors import LazyTensors
from tokenmill_executor.model.weights import load_checkpoint

from benchmarks.tables import keep, today
from tests.fakes.models import smollm2_path

# Flags, and bytes a parameter.
PRECISIONS = {
    "bf16": (("--dtype", "bfloat16"), 2.0),
    "int8": (("--dtype", "bfloat16", "--quantization", "int8"), 1.0),
    "int4": (("--dtype", "bfloat16", "--quantization", "int4"), 0.5),
}
KV_BYTES = 256 << 20
PROMPT_TOKENS = 4_000
START_BAR_S, MEMORY_BAR = 5.0, 1.3
_MIB = 1 << 20
_LIBRARIES = "import torch, tokenmill_executor.server, tokenmill_executor.model.loading; print(open('/proc/self/status').read())"


@dataclass(frozen=True)
class Started:
    """Seconds from the command to the first token; the executor's peak once its cache is full, in bytes."""

    first_token_s: float
    peak_bytes: int


def start(model: str, flags: tuple[str, ...], *, fill: bool) -> Started:
    with tempfile.TemporaryDirectory() as folder:
        address = f"unix:{folder}/scheduler.sock"
        command = [sys.executable, "-m", "tokenmill_cli.main", "serve", "all", "--model", model, *flags]
        command += [
            "--kv-cache-memory-bytes",
            str(KV_BYTES),
            "--listen",
            address,
            "--executor-listen",
            f"unix:{folder}/executor.sock",
        ]
        command += ["--database", f"sqlite:///{folder}/tokenmill.db", "--log-level", "warning"]
        begun_s = time.perf_counter()
        # In a session of its own: the two services end with it, whatever happens here.
        service = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
        try:
            with Client(address) as client:
                first_token_s = _first_token_s(client, begun_s)
                if fill:
                    _fill(client)
            return Started(first_token_s, _peak_bytes(_executor_of(service.pid)))
        finally:
            os.killpg(service.pid, signal.SIGTERM)
            service.wait(60)


def _first_token_s(client: Client, begun_s: float) -> float:
    client.wait_ready(timeout=120)
    for _ in client.generate("Once upon a time", max_tokens=1, temperature=0.0):
        pass
    return time.perf_counter() - begun_s


def _fill(client: Client) -> None:
    """The prefix cache keeps what is computed: prompts that differ, until every block has been used."""
    executor = client.admin.list_executors()[0]
    for number in range(executor.total_blocks * executor.block_size // PROMPT_TOKENS + 1):
        prompt = [1_000 + number, *range(1_000, 1_000 + PROMPT_TOKENS - 1)]
        for _ in client.generate(token_ids=prompt, max_tokens=1):
            pass


def _executor_of(pid: int) -> int:
    """Of the processes that `serve all` has started, the executor."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    (executor,) = [int(child) for child in children if b"tokenmill_executor" in Path(f"/proc/{child}/cmdline").read_bytes()]
    return executor


def _peak_bytes(pid: int) -> int:
    return _high_water(Path(f"/proc/{pid}/status").read_text())


def _high_water(status: str) -> int:
    found = re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def libraries_bytes() -> int:
    done = subprocess.run([sys.executable, "-c", _LIBRARIES], capture_output=True, text=True, check=True)
    return _high_water(done.stdout)


def parameters(model: str) -> int:
    tensors = load_checkpoint(model).tensors
    assert isinstance(tensors, LazyTensors)
    return sum(prod(tensors.rows(name).shape) for name in tensors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(smollm2_path()), help="a directory or file; without it, SmolLM2-135M-Instruct")
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    count, libraries = parameters(options.model), libraries_bytes()
    rows = []
    for precision, (flags, bytes_each) in PRECISIONS.items():
        filled = start(options.model, flags, fill=True)
        first_token_s = median(start(options.model, flags, fill=False).first_token_s for _ in range(options.repeat))
        weights, taken = count * bytes_each, filled.peak_bytes - libraries
        share = taken / (weights + KV_BYTES)
        sizes = [f"{size / _MIB:,.0f}" for size in (weights, KV_BYTES, filled.peak_bytes, taken)]
        cells = [precision, f"{first_token_s:.1f}", *sizes, f"{share:.2f}"]
        rows.append(f"| {' | '.join(cells)} |")
        print(rows[-1], file=sys.stderr)
    report = _report(Path(options.model).stem, options.repeat, libraries, rows)
    keep(f"startup-{Path(options.model).stem}", report)


def _report(model: str, repeat: int, libraries: int, rows: list[str]) -> str:
    started = f"command to first token, s (bar ≤ {START_BAR_S:g})"
    memory = ("weights MiB", "KV cache MiB", "peak MiB", "less libraries MiB", f"of weights + KV (bar ≤ {MEMORY_BAR:g})")
    head = ["", started, *memory]
    return "\n".join(
        [
            f"# Start-up, {model}, {today()}",
            "",
            f"`python -m benchmarks.startup`, medians of {repeat}; {os.cpu_count()} cores ({platform.machine()}), Python "
            f"{platform.python_version()}, load {os.getloadavg()[0]:.1f} at the end. Libraries: "
            f"{libraries / _MIB:,.0f} MiB, the peak (VmHWM) of a process that imports the executor's server and torch, and loads "
            "no model.",
            "",
            f"| {' | '.join(head)} |",
            f"|{'---|' * len(head)}",
            *rows,
            "",
        ]
    )


if __name__ == "__main__":
    main()
