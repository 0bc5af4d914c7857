"""Journals of small simulated services."""

from __future__ import annotations

from pathlib import Path

from tokenmill_scheduler.core.scheduler import SchedulerConfig
from tokenmill_scheduler.journal.scheduler import JournaledScheduler
from tokenmill_scheduler.journal.writer import JournalWriter
from tokenmill_simulator.measures import Measures
from tokenmill_simulator.requests import mixed
from tokenmill_simulator.simulation import Simulation
from tokenmill_workloads import burst

from tests.unit.simulator.loads import small_machines

MAX_BYTES = 1 << 30


def write_journal(path: Path, config: SchedulerConfig | None = None, count: int = 12, max_bytes: int = MAX_BYTES) -> Simulation:
    """Of a burst on a small executor that preempts now and then."""
    on = small_machines(num_blocks=24, seqs=4, caching=True)
    config = config or on.config()
    requests = mixed(burst(count, prompt_tokens=(3, 30), output_tokens=(2, 60)))
    simulation = Simulation(config, requests, on.executors, on.cost, Measures(requests))
    writer = JournalWriter(path, config, max_bytes, max_buffered=100_000)
    simulation.core = JournaledScheduler(config, writer)
    simulation.run()
    writer.close()
    return simulation
