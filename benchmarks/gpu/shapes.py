"""Models of a given shape with random weights, made on the device, and engines that run them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from tokenmill_executor.attention.backend import CacheShape
from tokenmill_executor.attention.triton_backend import TritonAttention
from tokenmill_executor.engine import Engine
from tokenmill_executor.model.capture import cuda_capture
from tokenmill_executor.model.config import ModelConfig, RopeConfig
from tokenmill_executor.model.cuda import cuda_decodes, cuda_draws
from tokenmill_executor.model.cuda_decodes import CudaDecodes
from tokenmill_executor.model.decoder import Decoder
from tokenmill_executor.model.device import HostClock, HostDownload
from tokenmill_executor.model.graphs import Capture, GraphedDecoder, run_eagerly
from tokenmill_executor.model.port import DecodeModel, Decodes
from tokenmill_executor.model.runner import TorchRunner
from tokenmill_executor.model.triton_ops import TritonOps
from tokenmill_executor.runner import RunnerDescription

BLOCK_SIZE = 16
LLAMA_8B = ModelConfig(
    architecture="llama",
    hidden_size=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=14336,
    vocab_size=128_256,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=500_000.0),
    tie_word_embeddings=False,
    qkv_bias=False,
    o_bias=False,
    mlp_bias=False,
    qk_norm=False,
    windows=(None,) * 32,
    max_position_embeddings=16_384,
    eos_token_ids=(128_001,),
)
SMALL = replace(
    LLAMA_8B,
    hidden_size=256,
    num_layers=4,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    intermediate_size=512,
    vocab_size=1000,
    windows=(None, 40, None, 40),
    max_position_embeddings=1024,
    eos_token_ids=(2,),
)
TINY = replace(SMALL, hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16, windows=(None, 9), vocab_size=200)


# How tokens are drawn, by what the tables call it.
DRAWN: Mapping[str, Mapping[str, Any]] = {
    "temperature": {"temperature": 0.8},
    "top_p": {"top_p": 0.95},
    "top_k, top_p, min_p": {"top_k": 50, "top_p": 0.9, "min_p": 0.01},
}


@dataclass(frozen=True, slots=True)
class Scale:
    """How large everything is. `dtypes` are those compared for being right; the speed is that of the last.

    `plan_steps`: of a plan that only decodes, as the service sends them.
    """

    config: ModelConfig
    small: ModelConfig
    dtypes: tuple[torch.dtype, ...]
    decode_batches: tuple[int, ...]
    profiled_batches: tuple[int, ...]
    context: int
    decode_steps: int
    plan_steps: int
    prompt: int
    chunks: tuple[int, ...]
    repeats: int
    requests: int
    output: int
    copy_bytes: int
    matrix: int
    max_num_seqs: int


FULL = Scale(
    config=LLAMA_8B,
    small=SMALL,
    dtypes=(torch.float32, torch.bfloat16),
    decode_batches=(1, 16, 64, 256),
    profiled_batches=(1, 64),
    context=512,
    decode_steps=64,
    plan_steps=16,
    prompt=8192,
    chunks=(2048, 8192),
    repeats=3,
    requests=64,
    output=64,
    copy_bytes=4 << 30,
    matrix=8192,
    max_num_seqs=256,
)
SMOKE = Scale(
    config=TINY,
    small=TINY,
    dtypes=(torch.float32,),
    decode_batches=(1, 2),
    profiled_batches=(2,),
    context=12,
    decode_steps=2,
    plan_steps=2,
    prompt=40,
    chunks=(20, 40),
    repeats=1,
    requests=2,
    output=2,
    copy_bytes=1 << 20,
    matrix=64,
    max_num_seqs=2,
)


class RandomTensors(Mapping[str, torch.Tensor]):
    """A state dict whose tensors are drawn when they are read, each always the same; norms are all ones."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._shapes = _shapes(config)
        self._dtype = dtype
        self._device = device

    def __getitem__(self, name: str) -> torch.Tensor:
        shape = self._shapes[name]
        if len(shape) == 1:
            return torch.ones(shape, dtype=self._dtype, device=self._device)
        generator = torch.Generator(self._device).manual_seed(list(self._shapes).index(name))
        tensor = torch.empty(shape, dtype=self._dtype, device=self._device)
        # Rows that keep the size of what they are multiplied with; embeddings of size one.
        scale = 1.0 if "embed" in name else 1.0 / math.sqrt(shape[1])
        return tensor.normal_(0.0, scale, generator=generator)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, kv = config.hidden_size, config.num_kv_heads * config.head_dim
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (config.num_heads * config.head_dim, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, config.num_heads * config.head_dim),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (config.intermediate_size, hidden),
        "mlp.up_proj": (config.intermediate_size, hidden),
        "mlp.down_proj": (hidden, config.intermediate_size),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for index in range(config.num_layers):
        shapes |= {f"model.layers.{index}.{name}.weight": shape for name, shape in layer.items()}
    return {**shapes, "model.norm.weight": (hidden,), "lm_head.weight": (config.vocab_size, hidden)}


def product_weights(config: ModelConfig) -> int:
    """Numbers in the matrices that a token passes: all but the embeddings, of which it reads a row."""
    return sum(math.prod(shape) for name, shape in _shapes(config).items() if "embed" not in name)


def kv_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Of one token."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize


def make_capture(device: torch.device) -> Capture:
    return cuda_capture(device) if device.type == "cuda" else run_eagerly


def graphed_decoder(
    config: ModelConfig, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, device: torch.device, max_num_seqs: int
) -> GraphedDecoder:
    """What runs on CUDA in service; on a CPU with interpreted kernels, and graphs that are computed again."""
    processors = None if device.type == "cuda" else 4
    attention = TritonAttention(CacheShape.of(config, dtype, device), processors)
    decoder = Decoder(config, tensors, dtype, device, config.max_model_len, lambda _: attention, TritonOps())
    return GraphedDecoder(decoder, attention, partial(make_capture, device), max_num_seqs, config.max_model_len)


@dataclass(frozen=True, slots=True)
class Executor:
    """An engine, and for a closer look the model it runs and how many blocks that has."""

    engine: Engine
    model: GraphedDecoder
    num_blocks: int
    dtype: torch.dtype
    device: torch.device


def make_runner(model: DecodeModel, dtype: torch.dtype, device: torch.device, several_steps: bool = True) -> TorchRunner:
    """As `load_runner` makes it for CUDA; with one step at a time, each comes back to the engine."""
    config, draws = model.config, cuda_draws("auto")
    name, length = str(dtype).removeprefix("torch."), config.max_model_len
    description = RunnerDescription(
        "random", config.vocab_size, length, config.eos_token_ids, str(device), name, model.block_groups
    )
    decodes: Decodes | None = None
    if several_steps and device.type == "cuda":
        decodes = cuda_decodes(model, draws, device)
    elif several_steps:
        decodes = CudaDecodes(model, draws, device, HostClock(), HostDownload)
    return TorchRunner(model, description, {}, device, lambda: 0, None, decodes, draws)


def make_executor(scale: Scale, dtype: torch.dtype, device: torch.device) -> Executor:
    config = scale.config
    model = graphed_decoder(config, RandomTensors(config, dtype, device), dtype, device, scale.max_num_seqs)
    tokens = max(scale.max_num_seqs * (scale.context + 2 * scale.decode_steps), scale.requests * (scale.context + scale.output))
    num_blocks = 2 * len(model.block_groups) * -(-max(tokens, scale.prompt) // BLOCK_SIZE)
    engine = Engine(make_runner(model, dtype, device), num_blocks, BLOCK_SIZE, scale.max_num_seqs)
    return Executor(engine, model, num_blocks, dtype, device)
