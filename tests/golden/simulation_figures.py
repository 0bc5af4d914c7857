"""Golden figures: an excerpt of a recorded trace on a simulated A100.

`python -m tests.golden.simulation_figures` writes them anew.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tokenmill_simulator.compare import candidate, machines, run
from tokenmill_simulator.figures import Target
from tokenmill_simulator.presets import preset
from tokenmill_simulator.requests import mixed
from tokenmill_workloads import read_trace

FOLDER = Path(__file__).parent / "simulation"
FIGURES = FOLDER / "azure_conversation_excerpt.json"
_CANDIDATES = ("fcfs", "static", "fcfs:4")


def render() -> str:
    requests = mixed(read_trace(FOLDER / "azure_conversation_excerpt.csv"))
    on = machines(preset("a100-8b"), requests)
    base = on.config(max_num_seqs=16)
    figures = {name: run(name, candidate(name, base), requests, on, Target()).figures for name in _CANDIDATES}
    return json.dumps({name: _rounded(asdict(value)) for name, value in figures.items()}, indent=1) + "\n"


def _rounded(value: Any) -> Any:
    """Nanoseconds are the same on every machine."""
    if isinstance(value, dict):
        return {name: _rounded(part) for name, part in value.items()}
    return round(value, 9) if isinstance(value, float) else value


if __name__ == "__main__":
    FIGURES.write_text(render(), encoding="utf-8")
