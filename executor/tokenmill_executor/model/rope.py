"""Rotary position embeddings with the scaling variants of transformers, as a table of cosines and sines.

Source: transformers' `modeling_rope_utils.py`; RoFormer (Su et al. 2021), YaRN (Peng et al. 2023).
"""

from __future__ import annotations

import math

import torch

from tokenmill_executor.model.config import ModelConfig, RopeConfig


def rotary_tables(config: ModelConfig, num_positions: int, rope: RopeConfig | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines, each [num_positions, head_dim / 2] float32, times YaRN's attention factor.

    Dynamic scaling stretches with the length of the sequence. Here a position's length is its own place in the sequence, as when
    transformers generates token by token, so that a token's K is the same however its sequence was cut into steps.

    By `rope`, or the model's own.
    """
    positions = torch.arange(num_positions, dtype=torch.float32)
    rope, dim = rope or config.rope, config.head_dim
    if rope.type == "dynamic":
        angles = positions[:, None] * _dynamic_frequencies(rope, dim, config.max_position_embeddings, positions + 1)
    else:
        angles = positions[:, None] * inverse_frequencies(rope, dim)
    scale = attention_factor(rope)
    return angles.cos() * scale, angles.sin() * scale


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates [T, heads, head_dim] by cos and sin of [T, 1, head_dim / 2]; a head's halves are the two coordinates."""
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def inverse_frequencies(rope: RopeConfig, dim: int) -> torch.Tensor:
    """[dim / 2] float32, for every scaling but the dynamic one."""
    frequencies = 1.0 / (rope.theta ** _exponents(dim))
    if rope.freq_factors is not None:
        frequencies = frequencies / torch.tensor(rope.freq_factors)
    if rope.type == "linear":
        return frequencies / rope.factor
    if rope.type == "llama3":
        return _llama3(rope, frequencies)
    if rope.type == "yarn":
        return _yarn(rope, dim)
    return frequencies


def attention_factor(rope: RopeConfig) -> float:
    """What YaRN multiplies cosines and sines by; 1 for the others."""
    if rope.type != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _yarn_scale(rope.factor, rope.mscale) / _yarn_scale(rope.factor, rope.mscale_all_dim)
    return _yarn_scale(rope.factor, 1.0)


def _exponents(dim: int) -> torch.Tensor:
    return torch.arange(0, dim, 2, dtype=torch.float32) / dim


def _dynamic_frequencies(rope: RopeConfig, dim: int, trained_len: int, lengths: torch.Tensor) -> torch.Tensor:
    """[len(lengths), dim / 2]."""
    stretch = rope.factor * lengths.clamp(min=trained_len) / trained_len - (rope.factor - 1)
    theta = rope.theta * stretch ** (dim / (dim - 2))
    return 1.0 / (theta[:, None] ** _exponents(dim))


def _llama3(rope: RopeConfig, frequencies: torch.Tensor) -> torch.Tensor:
    """Long waves are stretched by `factor`, short ones kept, those between blended."""
    wave_lengths = 2 * math.pi / frequencies
    trained_len = rope.original_max_position_embeddings
    blend = (trained_len / wave_lengths - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - blend) * frequencies / rope.factor + blend * frequencies
    is_long = wave_lengths > trained_len / rope.low_freq_factor
    is_short = wave_lengths < trained_len / rope.high_freq_factor
    return torch.where(is_long, frequencies / rope.factor, torch.where(is_short, frequencies, blended))


def _yarn(rope: RopeConfig, dim: int) -> torch.Tensor:
    powers = rope.theta ** _exponents(dim)
    low = _yarn_dimension(rope.beta_fast, dim, rope)
    high = _yarn_dimension(rope.beta_slow, dim, rope)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # no division by zero
    kept = 1 - ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return 1.0 / (rope.factor * powers) * (1 - kept) + 1.0 / powers * kept


def _yarn_dimension(rotations: float, dim: int, rope: RopeConfig) -> float:
    """The dimension whose wave turns this often over the trained length."""
    return dim * math.log(rope.original_max_position_embeddings / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))


def _yarn_scale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
