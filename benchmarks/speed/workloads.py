"""What the speed benchmark runs, and what it keeps of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tokenmill_workloads import FIXED, Arrival, scale_lengths

PRECISIONS = {"bf16": ("--dtype", "bfloat16"), "int8": ("--dtype", "bfloat16", "--quantization", "int8")}
# Of the first run's prompts; each run has its own, the same for all that are measured.
SEED = 42


@dataclass(frozen=True)
class Workload:
    """`fixed` as `tokenmill bench` calls it, at most `slots` sequences in a step. `bars` by precision, in tokens/s.

    `total`: prompt tokens count too. `best_seen`: of other servers on this kind of machine, when the bars were set.
    """

    name: str
    fixed: str
    slots: int
    total: bool
    bars: Mapping[str, int]
    best_seen: str

    def arrivals(self, length_scale: float) -> tuple[Arrival, ...]:
        return scale_lengths(FIXED[self.fixed](), length_scale)

    def counted_tokens(self, length_scale: float) -> int:
        """What tokens/s are of."""
        return sum(arrival.output_tokens + self.total * arrival.prompt_tokens for arrival in self.arrivals(length_scale))


WORKLOADS = (
    Workload("W1", "burst", 8, False, {"bf16": 380, "int8": 650}, "OpenVINO 241"),
    Workload("W2", "decode-heavy", 64, False, {"bf16": 900, "int8": 1_350}, "OpenVINO 714"),
    Workload("W3", "prefill-heavy", 64, True, {"bf16": 1_500, "int8": 2_100}, "OpenVINO 1,254"),
    Workload("W4", "shared-prefix", 64, True, {"bf16": 5_700, "int8": 8_000}, "vLLM 4,520"),
    Workload("W5", "single-stream", 64, False, {"bf16": 90, "int8": 190}, "llama.cpp Q8_0 121"),
)
WARM_UP, WARM_UP_SCALE = WORKLOADS[-1], 0.25


@dataclass(frozen=True)
class Run:
    """`tokens_per_s` counts as the workload says. `cpu_ms` is CPU time an output token by process, `idle_share` the executor's."""

    tokens_per_s: float
    output_tokens: int
    first_token_ms: float = 0.0
    inter_token_ms: float = 0.0
    idle_share: float = 0.0
    cpu_ms: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Measured:
    """One workload in one precision: service and bare engine in turns."""

    workload: Workload
    precision: str
    service: list[Run] = field(default_factory=list)
    bare: list[Run] = field(default_factory=list)
