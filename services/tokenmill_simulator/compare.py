"""Runs one load under several candidates: a policy or a batching mode of the core, with so many slots, on a preset's machines.

Which policies and modes there are, the core says. Must not know: how results are shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tokenmill_scheduler.core.batching import BATCHING_MODES
from tokenmill_scheduler.core.events import Event
from tokenmill_scheduler.core.plans import ExecutorDescription
from tokenmill_scheduler.core.policy import POLICIES
from tokenmill_scheduler.core.scheduler import SchedulerConfig

from tokenmill_simulator.cost import UNMEASURED, ServiceCost, StepCost
from tokenmill_simulator.entrance import Admittance
from tokenmill_simulator.figures import Figures, Target, summarise
from tokenmill_simulator.measures import Measures
from tokenmill_simulator.presets import Preset
from tokenmill_simulator.requests import SimulatedRequest
from tokenmill_simulator.settings import configured
from tokenmill_simulator.simulation import EVERYBODY, Simulation

MODEL = "simulated"


@dataclass(frozen=True, slots=True)
class Machines:
    """`count` executors that are all alike."""

    cost: StepCost
    description: ExecutorDescription
    count: int = 1
    service: ServiceCost = UNMEASURED

    def config(self, max_num_seqs: int | None = None, max_num_batched_tokens: int | None = None) -> SchedulerConfig:
        """A scheduler's for them: with their own limits, where no others are given."""
        own = self.description
        return SchedulerConfig(max_num_seqs or own.max_num_seqs, max_num_batched_tokens or own.max_num_batched_tokens)

    @property
    def executors(self) -> list[ExecutorDescription]:
        return [replace(self.description, name=f"executor-{index + 1}") for index in range(self.count)]


def machines(
    preset: Preset, requests: Sequence[SimulatedRequest], count: int = 1, block_size: int | None = None, host_gib: float = 0.0
) -> Machines:
    """Executors of a preset. They cache prefixes where the load says who shares one, in blocks as long as those it names.

    `host_gib`: host memory of each for blocks that leave the device. Raises ValueError where its copies were never measured.
    """
    if host_gib and not preset.kv_token_bytes:
        raise ValueError(f"what {preset.name} takes to copy from host memory was not measured")
    named = [request.arrival.hash_block_tokens for request in requests if request.arrival.hash_ids]
    size = block_size or max(named, default=preset.block_size)
    caches = any(request.shares_prefixes for request in requests)
    description = ExecutorDescription(
        "executor",
        MODEL,
        size,
        preset.kv_tokens // size,
        preset.max_model_len,
        preset.max_num_seqs,
        preset.max_num_batched_tokens,
        caches_prefixes=caches,
        cache_version="simulated" if caches else None,
        num_host_blocks=int(host_gib * 2**30 / (preset.kv_token_bytes * size)) if caches and host_gib else 0,
    )
    return Machines(preset.cost, description, count, preset.service)


@dataclass(frozen=True, slots=True)
class Run:
    """One candidate's run, named as it was asked for."""

    name: str
    config: SchedulerConfig
    figures: Figures
    measures: Measures = field(repr=False)


def candidate(name: str, base: SchedulerConfig) -> SchedulerConfig:
    """`name` is a policy or a batching mode, then what differs from the base: `+setting`, `:slots`.

    Settings are those of `settings.py`. Raises ValueError.
    """
    head, _, slots = name.partition(":")
    word, *settings = head.split("+")
    config = configured(base, settings)
    if slots:
        if not slots.isdigit() or int(slots) < 1:
            raise ValueError(f"{name!r}: after the colon comes a number of slots")
        config = replace(config, max_num_seqs=int(slots))
    if config.max_num_batched_tokens < config.max_num_seqs:
        raise ValueError(
            f"{config.max_num_batched_tokens} tokens a step are less than one for each of {config.max_num_seqs} slots: "
            "raise the one or lower the other"
        )
    if word in POLICIES:
        return replace(config, policy=word)
    if word not in BATCHING_MODES:
        raise ValueError(f"{word!r} is none of {', '.join(POLICIES)}, nor a batching mode ({', '.join(BATCHING_MODES)})")
    return replace(config, batching=word)


def run(
    name: str,
    config: SchedulerConfig,
    requests: Sequence[SimulatedRequest],
    on: Machines,
    target: Target,
    before: Sequence[Event] = (),
    admittance: Admittance = EVERYBODY,
) -> Run:
    """One run, as many slots as its config has: the machines' own limits are only what a config starts from.

    `before`: events that the core is given first. `admittance`: who is let in.
    """
    measures = Measures(requests, client_s=on.service.client_s)
    seqs, tokens = config.max_num_seqs, config.max_num_batched_tokens
    executors = [replace(executor, max_num_seqs=seqs, max_num_batched_tokens=tokens) for executor in on.executors]
    simulation = Simulation(config, requests, executors, on.cost, measures, before, admittance, on.service)
    simulation.run()
    figures = summarise(measures, simulation.core.counters, seqs, on.count, target)
    return Run(name, config, figures, measures)
