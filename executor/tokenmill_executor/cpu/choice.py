"""Chooses the C++ kernels for a model on a CPU in bfloat16 where they can run it, and says in the log where they cannot.

Must not know: settings beyond those that decide this.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import structlog
import torch

from tokenmill_executor.cpu.model import CpuModel
from tokenmill_executor.cpu.support import available, supports
from tokenmill_executor.model.config import ModelConfig, ModelError

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class CpuChoice:
    """`quantization` is of the weights: None, "int8" or "int4". `kv_cache_dtype` is any of those there are."""

    max_model_len: int
    block_size: int
    quantization: str | None
    kv_cache_dtype: str


def why_not(config: ModelConfig, choice: CpuChoice) -> str | None:
    """None if the kernels can run the model here, else the reason."""
    return available() or supports(
        config, block_size=choice.block_size, quantization=choice.quantization, kv_cache_dtype=choice.kv_cache_dtype
    )


def choose_kernels(config: ModelConfig, tensors: Mapping[str, torch.Tensor], choice: CpuChoice) -> CpuModel | None:
    """The model on the kernels, or None after one line in the log: torch's slower path runs it.

    Raises ModelError where quantised weights were asked for, which torch's path does not have.
    """
    reason = why_not(config, choice)
    if reason is None:
        return CpuModel(
            config,
            tensors,
            max_model_len=choice.max_model_len,
            quantization=choice.quantization,
            kv_cache_dtype=choice.kv_cache_dtype,
        )
    if choice.quantization is not None:
        raise ModelError(f"quantised weights need the C++ kernels, which cannot be used: {reason}.")
    log.warning("CPU kernels unused", reason=reason, instead="torch, several times slower")
    return None
