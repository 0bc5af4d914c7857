"""A GGUF file as a ModelConfig and a state dict with Hugging Face names.

Source: llama.cpp's `convert_hf_to_gguf.py`, which this undoes, and the key names in `gguf.constants`.
Must not know: devices, how anything is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from tokenmill_executor.model.config import DEFAULT_ROPE_THETA, ModelConfig, ModelError, RopeConfig
from tokenmill_executor.model.gguf_reader import GgufReader, StoredTensor
from tokenmill_executor.model.int4 import Int4Rows, from_q4_0, from_q4_1
from tokenmill_executor.model.tensors import LazyTensors

ARCHITECTURES = ("llama", "qwen2", "qwen3")
# What the library makes on the way of a large matrix is three times as large as its rows.
_ROWS_AT_ONCE = 2048
_INT4 = {GGMLQuantizationType.Q4_0: from_q4_0, GGMLQuantizationType.Q4_1: from_q4_1}
_TOP_LEVEL = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_Stored = np.ndarray[Any, np.dtype[Any]]
_Part = TypeVar("_Part")
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GgufFile:
    """An open (memory-mapped) GGUF file."""

    def __init__(self, path: Path) -> None:
        try:
            reader = GgufReader(path)
        except (ValueError, OSError) as error:
            raise ModelError(f"{path} cannot be read as a GGUF file: {error}.") from error
        self._fields, self._tensors, self._release = reader.fields, reader.tensors, reader.release
        self.architecture = str(self.field("general.architecture"))
        if self.architecture not in ARCHITECTURES:
            raise ModelError(
                f"GGUF models of architecture {self.architecture!r} are not supported; supported are {', '.join(ARCHITECTURES)}."
            )

    def field(self, name: str, default: Any = None) -> Any:
        """A metadata value as Python's own type; arrays as lists."""
        return self._fields.get(name, default)

    def config(self) -> ModelConfig:
        """Biases and norms are those whose tensors the file has."""
        hidden, heads = int(self._need("embedding_length")), int(self._need("attention.head_count"))
        head_dim = int(self._key("attention.key_length") or hidden // heads)
        if int(self._key("rope.dimension_count") or head_dim) != head_dim:
            raise ModelError("Models that rotate only a part of each head are not supported.")
        layers = int(self._need("block_count"))
        window = self._key("attention.sliding_window")
        return ModelConfig(
            architecture=self.architecture,
            hidden_size=hidden,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=int(self._key("attention.head_count_kv") or heads),
            head_dim=head_dim,
            intermediate_size=int(self._need("feed_forward_length")),
            vocab_size=int(self._tensors["token_embd.weight"].shape[0]),
            rms_norm_eps=float(self._need("attention.layer_norm_rms_epsilon")),
            rope=self._rope(),
            tie_word_embeddings="output.weight" not in self._tensors,
            qkv_bias="blk.0.attn_q.bias" in self._tensors,
            o_bias="blk.0.attn_output.bias" in self._tensors,
            mlp_bias="blk.0.ffn_down.bias" in self._tensors,
            qk_norm="blk.0.attn_q_norm.weight" in self._tensors,
            windows=((int(window) if window else None),) * layers,
            max_position_embeddings=int(self._need("context_length")),
            eos_token_ids=self._eos_token_ids(),
        )

    def tensors(self) -> LazyTensors:
        """float32, dequantised when read; those in 4 bits also as they are."""
        config = self.config()
        # rope_freqs.weight is in RopeConfig.freq_factors.
        named = {_hf_name(name): tensor for name, tensor in self._tensors.items() if name != "rope_freqs.weight"}
        return LazyTensors(
            {name: self._rows(tensor, config, _dequantized) for name, tensor in named.items()},
            {name: self._rows(tensor, config, _codes) for name, tensor in named.items() if tensor.type in _INT4},
        )

    def _rows(
        self, tensor: StoredTensor, config: ModelConfig, decode: Callable[[StoredTensor, _Stored], _Part]
    ) -> _StoredRows[_Part]:
        order = None
        if self.architecture == "llama" and ".attn_q." in tensor.name:
            order = _rotary_halves(tensor.shape[0], config.num_heads)
        if self.architecture == "llama" and ".attn_k." in tensor.name:
            order = _rotary_halves(tensor.shape[0], config.num_kv_heads)
        return _StoredRows(tensor, order, decode, self._release)

    def _key(self, name: str) -> Any:
        return self.field(f"{self.architecture}.{name}")

    def _need(self, name: str) -> Any:
        value = self._key(name)
        if value is None:
            raise ModelError(f"The GGUF file lacks the key {self.architecture}.{name}.")
        return value

    def _rope(self) -> RopeConfig:
        kind = self._key("rope.scaling.type") or "none"
        if kind not in ("none", "linear", "yarn"):
            raise ModelError(f"Rotary scaling {kind!r} of a GGUF file is not supported; supported are none, linear, yarn.")
        factors = self._tensors.get("rope_freqs.weight")
        return RopeConfig(
            theta=float(self._key("rope.freq_base") or DEFAULT_ROPE_THETA),
            type="default" if kind == "none" else kind,
            factor=float(self._key("rope.scaling.factor") or 1.0),
            original_max_position_embeddings=int(self._key("rope.scaling.original_context_length") or self._need("context_length")),
            freq_factors=None if factors is None else tuple(float(value) for value in factors.data),
        )

    def _eos_token_ids(self) -> tuple[int, ...]:
        """The end of text, and the ends of a turn and of a message where the file names them."""
        ids = [self.field(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
        return tuple(dict.fromkeys(int(token_id) for token_id in ids if token_id is not None))


@dataclass(frozen=True, slots=True)
class _StoredRows(Generic[_Part]):
    """Rows of a tensor as `decode` makes them of the stored ones, in the file's order or in that of `order`."""

    tensor: StoredTensor
    order: _Stored | None
    decode: Callable[[StoredTensor, _Stored], _Part]
    release: Callable[[], None]

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.tensor.shape)

    def __getitem__(self, rows: slice) -> _Part:
        part = self.decode(self.tensor, self.tensor.data[rows if self.order is None else self.order[rows]])
        self.release()
        return part


def _dequantized(tensor: StoredTensor, stored: _Stored) -> torch.Tensor:
    values = np.empty((len(stored), *tensor.shape[1:]), dtype=np.float32)
    for start in range(0, len(values), _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        if tensor.type in _INT4:
            # The same numbers as the library's, in half its time.
            values[rows] = _codes(tensor, stored[rows]).dequantize()
        else:
            values[rows] = dequantize(stored[rows], tensor.type)
    return torch.from_numpy(values)


def _codes(tensor: StoredTensor, stored: _Stored) -> Int4Rows:
    return _INT4[tensor.type](torch.from_numpy(stored.copy()))


def _hf_name(name: str) -> str:
    """`blk.3.attn_q.weight` → `model.layers.3.self_attn.q_proj.weight`."""
    parts = name.split(".")
    if parts[0] == "blk" and len(parts) == 4 and parts[2] in _IN_LAYER:
        return f"model.layers.{parts[1]}.{_IN_LAYER[parts[2]]}.{parts[3]}"
    if len(parts) == 2 and parts[0] in _TOP_LEVEL:
        return f"{_TOP_LEVEL[parts[0]]}.{parts[1]}"
    raise ModelError(f"The GGUF file has a tensor {name!r} that no supported model has.")


def _rotary_halves(num_rows: int, num_heads: int) -> _Stored:
    """[num_rows]: where each head's rows in halves, as Hugging Face has them, lie among rotary pairs, as GGUF has Llama's."""
    return np.arange(num_rows).reshape(num_heads, -1, 2).swapaxes(1, 2).reshape(num_rows)
