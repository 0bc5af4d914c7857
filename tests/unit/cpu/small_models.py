"""Random small decoders and batches, and the float32 oracle: the torch decoder over reference attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from tokenmill_executor.cpu import library, support
from tokenmill_executor.cpu.build import INSTRUCTION_SETS, library_path
from tokenmill_executor.cpu.model import CpuModel
from tokenmill_executor.model.config import ModelConfig, RopeConfig
from tokenmill_executor.model.decoder import Decoder
from tokenmill_executor.model.int4 import quantize
from tokenmill_executor.model.weights import expected_names
from tokenmill_executor.runner import Batch

BLOCKS_PER_GROUP = 160
NUM_BLOCKS = 2 * BLOCKS_PER_GROUP
MAX_MODEL_LEN = 1024
# Of the logits' norm, after two layers: bfloat16 rounds to 2^-9, int8 to 2^-8 of the largest of a group.
TOLERANCE = {(None, "auto"): 0.006, (None, "int8"): 0.012, ("int8", "auto"): 0.03, ("int8", "int8"): 0.03, ("int4", "auto"): 0.03}

needs_kernels = pytest.mark.skipif(support.available() is not None, reason=str(support.available()))
runnable_sets = [
    name for name in INSTRUCTION_SETS if library.processor_flags() >= library.REQUIRED_FLAGS[name] and library_path(name).exists()
]


def small_config(**changes: Any) -> ModelConfig:
    values: dict[str, Any] = {
        "architecture": "llama",
        "hidden_size": 128,
        "num_layers": 2,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 64,
        "intermediate_size": 192,
        "vocab_size": 301,
        "rms_norm_eps": 1e-5,
        "rope": RopeConfig(),
        "tie_word_embeddings": False,
        "qkv_bias": False,
        "o_bias": False,
        "mlp_bias": False,
        "qk_norm": False,
        "windows": None,
        "max_position_embeddings": MAX_MODEL_LEN,
        "eos_token_ids": (0,),
    } | changes
    values["windows"] = values["windows"] or (None,) * values["num_layers"]
    return ModelConfig(**values)


def random_tensors(config: ModelConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    """Such that activations stay near 1, and exact in bfloat16: what the kernels lose then is their own."""
    generator = torch.Generator().manual_seed(seed)
    return {name: _random_tensor(config, name, generator) for name in expected_names(config)}


def _random_tensor(config: ModelConfig, name: str, generator: torch.Generator) -> torch.Tensor:
    hidden, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    query, key = config.num_heads * head, config.num_kv_heads * head
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens": (config.vocab_size, hidden),
        "lm_head": (config.vocab_size, hidden),
        "q_proj": (query, hidden),
        "k_proj": (key, hidden),
        "v_proj": (key, hidden),
        "o_proj": (hidden, query),
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
        "q_norm": (head,),
        "k_norm": (head,),
    }
    part, kind = name.split(".")[-2:]
    shape = shapes.get(part, (hidden,))
    if kind == "bias":
        values = 0.1 * torch.randn(shape[:1], generator=generator)
    elif len(shape) == 1:
        values = 1 + 0.1 * torch.randn(shape, generator=generator)
    else:
        values = torch.randn(shape, generator=generator) / (1 if part == "embed_tokens" else shape[1] ** 0.5)
    return values.bfloat16().float()


def oracle(config: ModelConfig, tensors: dict[str, torch.Tensor]) -> Decoder:
    decoder = Decoder(config, tensors, torch.float32, torch.device("cpu"), MAX_MODEL_LEN)
    decoder.allocate(NUM_BLOCKS, library.BLOCK_SIZE)
    return decoder


def cpu_model(config: ModelConfig, tensors: Mapping[str, torch.Tensor], **settings: Any) -> CpuModel:
    model = CpuModel(config, tensors, max_model_len=MAX_MODEL_LEN, threads=2, **settings)
    model.allocate(NUM_BLOCKS, library.BLOCK_SIZE)
    return model


def scattered_tables(num_sequences: int, max_len: int, seed: int = 0, num_blocks: int = BLOCKS_PER_GROUP) -> list[list[int]]:
    """Block tables that lie anywhere in the cache."""
    width = -(-max_len // library.BLOCK_SIZE)
    blocks = np.random.default_rng(seed).permutation(num_blocks)[: num_sequences * width]
    return [[int(block) for block in row] for row in blocks.reshape(num_sequences, width)]


def make_batch(sequences: list[tuple[list[int], int, list[int]]], groups: int = 1) -> Batch:
    """Of sequences as (tokens so far, how many of them are new, block table); each samples.

    The second group of layers has blocks of its own, far behind those of the first.
    """
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    starts = [0]
    tables = np.zeros((len(sequences), max(len(table) for _, _, table in sequences)), np.int32)
    for row, (tokens, new, table) in enumerate(sequences):
        places = range(len(tokens) - new, len(tokens))
        token_ids += tokens[len(tokens) - new :]
        positions += places
        slots += [table[place // library.BLOCK_SIZE] * library.BLOCK_SIZE + place % library.BLOCK_SIZE for place in places]
        starts.append(len(token_ids))
        used = -(-len(tokens) // library.BLOCK_SIZE)
        tables[row, :used] = table[:used]
    return Batch(
        _ints(token_ids),
        _ints(positions),
        _ints([[slot + group * BLOCKS_PER_GROUP * library.BLOCK_SIZE for slot in slots] for group in range(groups)]),
        _ints(starts),
        _ints([len(tokens) for tokens, _, _ in sequences]),
        np.stack([tables + group * BLOCKS_PER_GROUP for group in range(groups)]).astype(np.int32),
        _ints(list(range(len(sequences)))),
    )


def random_tokens(config: ModelConfig, count: int, seed: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, config.vocab_size, count)]


def representable(tensors: dict[str, torch.Tensor], quantization: str | None) -> dict[str, torch.Tensor]:
    """What 4 bits make of weights is no fault of the kernels."""
    if quantization != "int4":
        return tensors
    return {name: quantize(one).dequantize() if "_proj.weight" in name else one for name, one in tensors.items()}


def assert_near_oracle(model: CpuModel, tensors: dict[str, torch.Tensor], steps: list[Batch], tolerance: float) -> None:
    reference = oracle(model.config, tensors)
    for number, batch in enumerate(steps):
        found, expected = model.forward(batch), reference.forward(batch)
        errors = [relative_error(a, b) for a, b in zip(found, expected, strict=True)]
        assert max(errors) < tolerance, f"step {number}: {errors}"


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def _ints(values: list[int] | list[list[int]]) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array(values, np.int32)
