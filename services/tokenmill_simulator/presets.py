"""Machines to simulate: a step's cost, the room for KV blocks, and limits that fit them.

Computed ones come from what vendors publish; measured ones are fitted to milliseconds of the real CPU executor, which are kept in
`measured.json` with how they were measured. Must not know: arrivals, the core.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import resources

from tokenmill_simulator.cost import UNMEASURED, ServiceCost, StepCost

_GB = 1e9
# Shares of the published peaks that good kernels reach in large matrix products and in long reads.
_COMPUTE_SHARE = 0.6
_BANDWIDTH_SHARE = 0.85
# Share of a device's memory for weights and KV together.
_MEMORY_SHARE = 0.9
# Launches, sampling and the host's work in a step; with tensor parallelism also two all-reduces a layer.
_STEP_S = 1e-3
_ALL_REDUCE_S = 10e-6
_BYTES = 2  # of a bfloat16
_PCIE4, _PCIE5 = 32e9, 64e9  # bytes/s of 16 lanes, one way
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Preset:
    """One executor. `kv_tokens` is the room of its KV cache, `kv_token_bytes` what one takes in host memory; 0: no tier there."""

    name: str
    about: str
    cost: StepCost
    kv_tokens: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int = BLOCK_SIZE
    kv_token_bytes: int = 0
    service: ServiceCost = UNMEASURED


@dataclass(frozen=True, slots=True)
class Device:
    """Dense bfloat16 FLOP/s without sparsity, bytes/s, bytes, bytes/s from the host: the vendor's data sheet of the SXM form."""

    name: str
    flops: float
    bandwidth: float
    memory: float
    host_bandwidth: float


@dataclass(frozen=True, slots=True)
class Shape:
    """Of Llama 3's models (Grattafiori et al., "The Llama 3 Herd of Models", 2024)."""

    name: str
    parameters: float
    layers: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def kv_bytes(self) -> int:
        """Of one token, in bfloat16."""
        return 2 * self.layers * self.kv_heads * self.head_dim * _BYTES

    @property
    def pair_flops(self) -> int:
        """QK and PV, a multiply and an add each, for one query and one key."""
        return 4 * self.layers * self.heads * self.head_dim


A100 = Device("A100-80GB", 312e12, 2.039e12, 80 * _GB, _PCIE4)
H100 = Device("H100-80GB", 989.4e12, 3.35e12, 80 * _GB, _PCIE5)
H200 = Device("H200-141GB", 989.4e12, 4.8e12, 141 * _GB, _PCIE5)
SHAPE_8B = Shape("8B", 8.03e9, 32, 32, 8, 128)
SHAPE_70B = Shape("70B", 70.6e9, 80, 64, 8, 128)


def roofline(name: str, device: Device, shape: Shape, devices: int = 1) -> Preset:
    """`devices` share each layer (tensor parallelism)."""
    flops = device.flops * devices * _COMPUTE_SHARE
    bandwidth = device.bandwidth * devices * _BANDWIDTH_SHARE
    weights = shape.parameters * _BYTES
    row_s = 2 * shape.parameters / flops
    reduce_s = 2 * shape.layers * _ALL_REDUCE_S if devices > 1 else 0.0
    kv_s, pair_s = shape.kv_bytes / bandwidth, shape.pair_flops / flops
    copy_s = shape.kv_bytes / (device.host_bandwidth * devices * _BANDWIDTH_SHARE)
    cost = StepCost(_STEP_S + reduce_s, weights / bandwidth, row_s, 0.0, kv_s, pair_s, copy_token_s=copy_s)
    kv_tokens = int((device.memory * devices * _MEMORY_SHARE - weights) / shape.kv_bytes)
    about = (
        f"{devices} × {device.name}, {shape.name} in bfloat16: computed from {device.flops / 1e12:g} TFLOP/s × {_COMPUTE_SHARE:g} "
        f"and {device.bandwidth / 1e12:g} TB/s × {_BANDWIDTH_SHARE:g}"
    )
    return Preset(name, about, cost, kv_tokens, 131_072, 256, 2048, kv_token_bytes=shape.kv_bytes)


# ---- measured ------------------------------------------------------------------------------------------------------------------


def fit_cpu(milliseconds: Mapping[str, float], other_ms: float) -> StepCost:
    """From five steps named `sequences × context`, or `chunk after context`: as many figures as there are unknowns.

    One and 8 sequences read the weights all the same: what 7 more take is a decode's own part. 32 compute: the rest of theirs is
    rows. k is from 32 sequences at two lengths, and what the chunk takes beyond its rows are its pairs. The fixed cost is only what
    is beside the forward pass (`other_ms`), for a pass without any arithmetic takes a hundredth of one.
    """
    kv_ms = (milliseconds["32 × 512"] - milliseconds["32 × 128"]) / (32 * (512 - 128))
    without_kv = {n: milliseconds[f"{n} × 128"] - n * 128 * kv_ms for n in (1, 8, 32)}
    decode_ms = (without_kv[8] - without_kv[1]) / 7
    row_ms = without_kv[32] / 32 - decode_ms
    pairs = 512 * 512 + 512 * 513 // 2
    pair_ms = (milliseconds["512 after 512"] - 512 * row_ms - 1024 * kv_ms) / pairs
    terms_ms = (other_ms, without_kv[1] - decode_ms, row_ms, decode_ms, kv_ms, pair_ms)
    return StepCost(*[term_ms / 1e3 for term_ms in terms_ms])


def _measured(way: str, name: str) -> Preset:
    figures = json.loads(resources.files(__package__).joinpath("measured.json").read_text(encoding="utf-8"))
    cost = fit_cpu(figures["step_ms"][way], figures["other_ms"])
    about = f"SmolLM2-135M, {way}: measured, {figures['how']}"
    around_s = {part: figures[f"{part}_ms"] / 1e3 for part in ("client", "lead", "link")}
    service = ServiceCost(around_s["client"], around_s["lead"], figures["prefill_lead"], around_s["link"])
    return Preset(name, about, cost, figures["kv_tokens"], figures["max_model_len"], 64, 512, service=service)


_MAKERS: dict[str, Callable[[str], Preset]] = {
    "cpu-smollm2-bf16": partial(_measured, "C++ bfloat16"),
    "cpu-smollm2-int8": partial(_measured, "C++ int8, KV int8"),
    "cpu-smollm2-torch": partial(_measured, "torch bfloat16"),
    "a100-8b": partial(roofline, device=A100, shape=SHAPE_8B),
    "a100-70b": partial(roofline, device=A100, shape=SHAPE_70B, devices=4),
    "h100-8b": partial(roofline, device=H100, shape=SHAPE_8B),
    "h100-70b": partial(roofline, device=H100, shape=SHAPE_70B, devices=4),
    "h200-8b": partial(roofline, device=H200, shape=SHAPE_8B),
    "h200-70b": partial(roofline, device=H200, shape=SHAPE_70B, devices=2),
}
PRESETS = tuple(_MAKERS)


def preset(name: str) -> Preset:
    """Raises KeyError when there is none of this name."""
    return _MAKERS[name](name)
