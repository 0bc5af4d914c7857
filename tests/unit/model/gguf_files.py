"""Writes small GGUF files as llama.cpp's converter does: names from the `gguf` library, its order of Llama's Q and K rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

_ARCHITECTURES = {"llama": "LLAMA", "qwen2": "QWEN2", "qwen3": "QWEN3"}


def write_model(path: Path, family: str, model: Any, **extra: Any) -> None:
    """A transformers model. `extra` are keys of the architecture, such as rope_scaling_factor for {arch}.rope.scaling.factor."""
    config, state = model.config, model.state_dict()
    writer = gguf.GGUFWriter(path, family)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    writer.add_eos_token_id(2)
    for key, value in extra.items():
        getattr(writer, f"add_{key}")(value)
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, _ARCHITECTURES[family]), config.num_hidden_layers)
    for name, tensor in state.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if family == "llama" and (".q_proj." in name or ".k_proj." in name):
            tensor = _permuted(tensor, config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads)
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert gguf_name is not None
        writer.add_tensor(gguf_name, tensor.numpy())
    _close(writer)


def write_tokenizer(path: Path, model: str, tokens: list[str], types: list[int], **fields: Any) -> None:
    """A file with a tokenizer alone, which is enough to build one. `fields` are methods of GGUFWriter without `add_`."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    for name, value in fields.items():
        getattr(writer, f"add_{name}")(value)
    _close(writer)


def add_rope_factors(path: Path, factors: list[float]) -> None:
    """Copies the file with a tensor of rotary factors, as files of Llama 3 have it."""
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(path.with_suffix(".factors.gguf"), "llama")
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            writer.add_key_value(field.name, field.contents(), field.types[0])
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data))
    writer.add_tensor("rope_freqs.weight", np.array(factors, dtype=np.float32))
    _close(writer)


def _permuted(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    halves = rows.view(num_heads, 2, -1, *rows.shape[1:])
    return halves.transpose(1, 2).reshape(rows.shape).contiguous()


def _close(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
