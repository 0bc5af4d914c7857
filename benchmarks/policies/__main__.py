"""What batching modes and policies do to loads, by simulation: the production core, model executors, a virtual clock.

    python -m benchmarks.policies azure_llm_2023_conversation.csv.gz mooncake_conversation.jsonl.gz:4000

The burst workload (`bursts.py`), then each policy of the core on each trace, or on its first so many requests (`traces.py`). Writes
its tables to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from tokenmill_simulator.presets import preset

from benchmarks.policies.bursts import CPU, bursts
from benchmarks.policies.traces import CACHING, PLAIN, trace
from benchmarks.tables import table_path, today


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=_part, nargs="*", metavar="TRACE[:COUNT]", help="whole, or its first COUNT requests")
    options = parser.parse_args()
    started_s = time.process_time()
    parts = [bursts(name) for name in (PLAIN.preset, CPU)]
    text = ""
    for part in (None, *options.traces):
        # After each, for a run of minutes may be cut short.
        parts += [] if part is None else [trace(*part)]
        text = "\n".join([_heading(time.process_time() - started_s), *parts])
        table_path("policies").write_text(text, encoding="utf-8")
    print(text)


def _part(word: str) -> tuple[Path, int | None]:
    path, colon, count = word.rpartition(":")
    return (Path(path), int(count)) if colon and count.isdigit() else (Path(word), None)


def _heading(cpu_s: float) -> str:
    plain, caching = (preset(fleet.preset) for fleet in (PLAIN, CACHING))
    return f"""\
# Batching modes and policies, simulated, {today()}

`python -m benchmarks.policies TRACE…`, {cpu_s:.0f} s of CPU. The scheduler's core against model executors under a virtual clock.
{plain.name}: {plain.about};
{caching.name}: {caching.about};
{plain.max_num_seqs} slots, {plain.max_num_batched_tokens} tokens a step where nothing else is said.
"""


if __name__ == "__main__":
    main()
