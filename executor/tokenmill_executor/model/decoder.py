"""The Llama-family decoder as a torch forward pass over the flat batch: Llama, SmolLM2, Mistral, Qwen2, Qwen3, Gemma 3.

Must not know: sampling, sequences, where K and V lie (the attention backend does).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own usage

from tokenmill_executor.attention.backend import AttentionBackend, AttentionBatch, CacheShape
from tokenmill_executor.attention.reference import ReferenceAttention
from tokenmill_executor.attention.rotation import rotated
from tokenmill_executor.model.config import ModelConfig
from tokenmill_executor.model.linear import Linear, LinearMaker, make_linear
from tokenmill_executor.model.ops import Ops, TorchOps
from tokenmill_executor.model.rope import rotary_tables
from tokenmill_executor.runner import Batch, BlockGroup, Int32Array
from tokenmill_executor.upload import upload


@dataclass(frozen=True, slots=True)
class _Layer:
    """`qkv` and `gate_up` are fused projections: their outputs lie side by side. `turn` is which rotary tables it takes.

    `attention_out_norm` and `mlp_out_norm` are of models with sandwich norms.
    """

    input_norm: torch.Tensor
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear
    turn: int = 0
    attention_out_norm: torch.Tensor | None = None
    mlp_out_norm: torch.Tensor | None = None


def reference_attention(shape: CacheShape) -> AttentionBackend:
    return rotated(ReferenceAttention(shape), shape)


class Decoder:
    """A `Model` in torch. Weights are read from `tensors` one layer at a time and kept in `dtype` on `device`.

    `linear` makes the layers' projections, and may quantise their weights; the head stays in `dtype`.
    """

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, torch.Tensor],
        dtype: torch.dtype,
        device: torch.device,
        max_model_len: int,
        make_attention: Callable[[CacheShape], AttentionBackend] = reference_attention,
        ops: Ops | None = None,
        kv_cache_dtype: str = "auto",
        linear: LinearMaker = make_linear,
    ) -> None:
        self.config = config
        self.device = device
        self._cache_shape = CacheShape.of(config, dtype, device, kv_cache_dtype)
        self._attention = make_attention(self._cache_shape)
        self._ops = ops or TorchOps()
        weights = _Weights(tensors, dtype, device, config.norm_offset, linear)
        self._embeddings = weights.get("model.embed_tokens.weight")
        self._layers = [_load_layer(config, weights, layer) for layer in range(config.num_layers)]
        self._norm = weights.norm("model.norm.weight")
        self._head = make_linear(self._embeddings if config.tie_word_embeddings else weights.get("lm_head.weight"))
        # As transformers: angles in float32, cosines and sines rounded to the model's type.
        ropes = [config.rope] if config.local_rope is None else [config.rope, config.local_rope]
        tables = [rotary_tables(config, max_model_len, rope) for rope in ropes]
        self._turns = [(cos.to(device, dtype), sin.to(device, dtype)) for cos, sin in tables]
        self._activate = self._ops.silu_mul if config.activation == "silu" else self._ops.gelu_mul
        # Rounded to the model's type, as transformers has it.
        self._embedding_scale = float(torch.tensor(config.embedding_scale).to(dtype))
        self.block_size = 0

    @property
    def block_groups(self) -> tuple[BlockGroup, ...]:
        """Of layers that share KV blocks."""
        return self._cache_shape.layout.groups

    def block_bytes(self, block_size: int) -> int:
        """K and V of a group's layers for one block."""
        return self._cache_shape.block_bytes(block_size)

    def allocate(self, num_blocks: int, block_size: int) -> None:
        """Makes the KV cache, dropping an earlier one."""
        self.block_size = block_size
        self._attention.allocate(num_blocks, block_size)

    def storage(self) -> list[torch.Tensor]:
        """The KV cache, [num_blocks, ...] each."""
        return self._attention.storage()

    def forward(self, batch: Batch) -> torch.Tensor:
        """One step. → logits of the rows that sample, [len(sample_rows), vocab_size] float32, on the device.

        Logits of a sequence whose numbers overflowed are NaN. Raises ArithmeticError if such a sequence does not sample.
        """
        self._attention.prepare(AttentionBatch.of(batch, self.device))
        hidden, normed = self.hidden(self._indices(batch.token_ids), self._indices(batch.positions))
        logits = self.logits(normed.index_select(0, self._indices(batch.query_starts[batch.sample_rows + 1] - 1)))
        finite = hidden.isfinite().all(dim=1)
        return logits if bool(finite.all()) else self._contain(batch, ~finite, logits)

    def decode(self, batch: Batch, token_ids: torch.Tensor) -> torch.Tensor:
        """See `model.port.DecodeModel`: so it does not look whether all are numbers, as `forward` does."""
        self._attention.prepare(AttentionBatch.of(batch, self.device))
        _, normed = self.hidden(token_ids, self._indices(batch.positions))
        return self.logits(normed)

    def erase(self, batch: Batch, rows: Sequence[int]) -> None:
        """See `model.port.DecodeModel`. Any rows of any flat batch."""
        self._attention.erase(self._indices(batch.slots[:, rows].ravel()))

    def hidden(self, token_ids: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[T] and [T] → the last layer's output and its norm, [T, hidden_size] each. The attention backend has been prepared.

        Waits for nothing on a device, so that a graph can capture it.
        """
        turns = [(cos.index_select(0, positions)[:, None], sin.index_select(0, positions)[:, None]) for cos, sin in self._turns]
        ops, eps = self._ops, self.config.rms_norm_eps
        hidden = F.embedding(token_ids, self._embeddings)
        if self._embedding_scale != 1.0:
            hidden = hidden * self._embedding_scale
        normed = ops.rms_norm(hidden, self._layers[0].input_norm, eps)
        next_norms = [*(layer.input_norm for layer in self._layers[1:]), self._norm]
        for index, (layer, next_norm) in enumerate(zip(self._layers, next_norms, strict=True)):
            update = self._attend(index, layer, normed, *turns[layer.turn])
            if layer.attention_out_norm is not None:
                update = ops.rms_norm(update, layer.attention_out_norm, eps)
            hidden, normed = ops.add_rms_norm(hidden, update, layer.mlp_norm, eps)
            update = layer.down(self._activate(layer.gate_up(normed)))
            if layer.mlp_out_norm is not None:
                update = ops.rms_norm(update, layer.mlp_out_norm, eps)
            hidden, normed = ops.add_rms_norm(hidden, update, next_norm, eps)
        return hidden, normed

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        """[rows, hidden_size] → [rows, vocab_size] float32. Those of a row that is not all numbers are NaN."""
        return self._head(normed).float()

    def _contain(self, batch: Batch, poisoned: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Some tokens of the batch, [T] bool, are not numbers: keeps that from the cache and reports their sequences."""
        rows = poisoned.nonzero().squeeze(1).tolist()
        self.erase(batch, rows)
        sequences = np.unique(np.searchsorted(batch.query_starts, rows, side="right") - 1)
        silent = np.setdiff1d(sequences, batch.sample_rows)
        if len(silent):
            raise ArithmeticError(f"the hidden states of {len(silent)} sequences in mid-prompt are not numbers")
        logits[torch.from_numpy(np.isin(batch.sample_rows, sequences)).to(logits.device)] = torch.nan
        return logits

    def _attend(self, index: int, layer: _Layer, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        config, ops = self.config, self._ops
        heads = layer.qkv(hidden).view(len(hidden), -1, config.head_dim)
        query, key, value = torch.split(heads, [config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            query = ops.rms_norm(query, layer.q_norm, config.rms_norm_eps)
            key = ops.rms_norm(key, layer.k_norm, config.rms_norm_eps)
        query, key = ops.rotate(query, key, cos, sin)
        self._attention.write_kv(index, key, value)
        return layer.output(self._attention.attend(index, query).flatten(1))

    def _indices(self, indices: Int32Array) -> torch.Tensor:
        return upload(np.ascontiguousarray(indices, dtype=np.int64), self.device)


class _Weights:
    """Reads tensors in the type and on the device to compute with."""

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, device: torch.device, norm_offset: float, linear: LinearMaker
    ) -> None:
        self._tensors = tensors
        self._dtype = dtype
        self._device = device
        self._norm_offset = norm_offset
        self._linear = linear

    def get(self, name: str) -> torch.Tensor:
        return self._tensors[name].to(self._device, self._dtype)

    def norm(self, name: str) -> torch.Tensor:
        """Weights of a norm; offset ones stay in float32."""
        if self._norm_offset == 0.0:
            return self.get(name)
        return self._tensors[name].to(self._device, torch.float32) + self._norm_offset

    def fused(self, prefix: str, names: tuple[str, ...], bias: bool) -> Linear:
        """Projections of the same input as one."""
        weight = torch.cat([self.get(f"{prefix}.{name}.weight") for name in names])
        return self._linear(weight, torch.cat([self.get(f"{prefix}.{name}.bias") for name in names]) if bias else None)


def _load_layer(config: ModelConfig, weights: _Weights, index: int) -> _Layer:
    prefix = f"model.layers.{index}"
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    sandwich = config.sandwich_norms
    return _Layer(
        input_norm=weights.norm(f"{prefix}.input_layernorm.weight"),
        qkv=weights.fused(attention, ("q_proj", "k_proj", "v_proj"), config.qkv_bias),
        q_norm=weights.norm(f"{attention}.q_norm.weight") if config.qk_norm else None,
        k_norm=weights.norm(f"{attention}.k_norm.weight") if config.qk_norm else None,
        output=weights.fused(attention, ("o_proj",), config.o_bias),
        # With sandwich norms "post attention" names the one before the addition.
        mlp_norm=weights.norm(f"{prefix}.{'pre_feedforward' if sandwich else 'post_attention'}_layernorm.weight"),
        gate_up=weights.fused(mlp, ("gate_proj", "up_proj"), config.mlp_bias),
        down=weights.fused(mlp, ("down_proj",), config.mlp_bias),
        turn=int(index in config.local_layers),
        attention_out_norm=weights.norm(f"{prefix}.post_attention_layernorm.weight") if sandwich else None,
        mlp_out_norm=weights.norm(f"{prefix}.post_feedforward_layernorm.weight") if sandwich else None,
    )
