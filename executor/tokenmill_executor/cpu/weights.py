"""A decoder's weights for the C++ kernels: read from a model's tensors by name, a few rows at a time, and packed into one arena.

Must not know: KV caches, steps.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tokenmill_executor.cpu import library
from tokenmill_executor.cpu.memory import HugeArena, padded_bytes
from tokenmill_executor.cpu.packing import Interleaved, Joined, PackedMatrix, Weight, pack, packed_bytes, slices
from tokenmill_executor.model.config import ModelConfig
from tokenmill_executor.model.tensors import LazyTensors, Rows

_EMBEDDINGS = "model.embed_tokens.weight"


class WeightPacker:
    """The arena is as large as all weights. `panel` is the width of panels. What must stay alive is appended to `kept`."""

    def __init__(
        self, config: ModelConfig, tensors: Mapping[str, torch.Tensor], kind: str, panel: int, kept: list[torch.Tensor]
    ) -> None:
        self._config = config
        self._tensors = tensors
        self._kind = kind
        self._panel = panel
        self._head_kind = _head_kind(kind)
        self._kept = kept
        self._arena = HugeArena(_weight_bytes(config, kind, panel))

    def keep(self, tensor: torch.Tensor) -> int:
        self._kept.append(tensor)
        return tensor.data_ptr()

    def vector(self, name: str) -> int:
        return self.keep(self._tensors[name].float().contiguous().clone())

    def embeddings(self) -> int:
        rows = self._rows(_EMBEDDINGS)
        count, width = rows.shape
        table = self._arena.take((count, width), torch.bfloat16)
        for part in slices(count, width, self._panel):
            table[part] = rows[part]
        return self.keep(table)

    def head(self) -> library.Matrix:
        tied = self._config.tie_word_embeddings
        return self._pack(self._rows(_EMBEDDINGS if tied else "lm_head.weight"), None, self._head_kind)

    def fill_layer(self, layer: library.Layer, index: int) -> None:
        config, prefix = self._config, f"model.layers.{index}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        qkv = [f"{attention}.{name}_proj" for name in "qkv"]
        qkv_bias = torch.cat([self._tensors[f"{name}.bias"] for name in qkv]) if config.qkv_bias else None
        layer.qkv = self._pack(Joined([self._weight(name) for name in qkv]), qkv_bias)
        layer.o = self._pack(self._weight(f"{attention}.o_proj"), self._bias(f"{attention}.o_proj", config.o_bias))
        gate, up, down = f"{mlp}.gate_proj", f"{mlp}.up_proj", f"{mlp}.down_proj"
        gate_bias, up_bias = self._bias(gate, config.mlp_bias), self._bias(up, config.mlp_bias)
        bias = None if gate_bias is None or up_bias is None else torch.stack((gate_bias, up_bias), 1).flatten()
        layer.gate_up = self._pack(Interleaved(self._weight(gate), self._weight(up)), bias)
        layer.down = self._pack(self._weight(down), self._bias(down, config.mlp_bias))
        layer.input_norm = self.vector(f"{prefix}.input_layernorm.weight")
        layer.post_norm = self.vector(f"{prefix}.post_attention_layernorm.weight")
        if config.qk_norm:
            layer.q_norm = self.vector(f"{attention}.q_norm.weight")
            layer.k_norm = self.vector(f"{attention}.k_norm.weight")
        layer.window = config.windows[index] or 0

    def _weight(self, name: str) -> Weight:
        """For int4 the codes that the file has, if it has any."""
        stored = None
        if self._kind == "int4" and isinstance(self._tensors, LazyTensors):
            stored = self._tensors.int4(f"{name}.weight")
        return self._rows(f"{name}.weight") if stored is None else stored

    def _rows(self, name: str) -> Rows[torch.Tensor]:
        return self._tensors.rows(name) if isinstance(self._tensors, LazyTensors) else self._tensors[name]

    def _bias(self, name: str, biased: bool) -> torch.Tensor | None:
        return self._tensors[f"{name}.bias"] if biased else None

    def _pack(self, weight: Weight, bias: torch.Tensor | None, kind: str | None = None) -> library.Matrix:
        packed: PackedMatrix = pack(weight, bias, kind or self._kind, self._panel, self._arena)
        self._kept.extend(packed.kept)
        return packed.record


def _head_kind(kind: str) -> str:
    """The head, and with it often the embeddings, loses most by 4 bits: it has 8."""
    return "int8" if kind == "int4" else kind


def _weight_bytes(config: ModelConfig, kind: str, panel: int) -> int:
    attention = config.num_heads * config.head_dim
    qkv = attention + 2 * config.num_kv_heads * config.head_dim
    layer = (
        packed_bytes(qkv, config.hidden_size, kind, panel)
        + packed_bytes(config.hidden_size, attention, kind, panel)
        + packed_bytes(2 * config.intermediate_size, config.hidden_size, kind, panel)
        + packed_bytes(config.hidden_size, config.intermediate_size, kind, panel)
    )
    tied = config.tie_word_embeddings
    embeddings = 0 if tied else padded_bytes((config.vocab_size, config.hidden_size), torch.bfloat16)
    head = packed_bytes(config.vocab_size, config.hidden_size, _head_kind(kind), panel)
    return embeddings + head + config.num_layers * layer
