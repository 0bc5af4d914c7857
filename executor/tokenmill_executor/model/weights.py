"""Checkpoints: a Hugging Face directory (safetensors) or a GGUF file as a ModelConfig and a canonical state dict.

Names are Hugging Face's for Llama (`model.layers.0.self_attn.q_proj.weight`), a projection is [out, in], and the rows of Q and K
are in Hugging Face's order (rotary halves). `lm_head.weight` is there only when the embeddings are not tied.
Must not know: devices, data types to compute in, how anything is computed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from tokenmill_executor.model.config import ModelConfig, ModelError, config_from_hf
from tokenmill_executor.model.gguf_file import GgufFile
from tokenmill_executor.model.tensors import LazyTensors


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """`tensors` come in the type they are stored in (GGUF: float32). They may be mapped files: do not write into them.

    `source`, the directory or the opened file, is where its tokenizer is found.
    """

    name: str
    config: ModelConfig
    tensors: LazyTensors
    source: Path | GgufFile


def load_checkpoint(path: str | Path) -> Checkpoint:
    """Of a Hugging Face directory or a .gguf file. Raises ModelError, with a sentence for the operator."""
    path = Path(path)
    if path.is_dir():
        checkpoint = _load_hf(path)
    elif path.is_file():
        file = GgufFile(path)
        checkpoint = Checkpoint(path.stem, file.config(), file.tensors(), file)
    else:
        raise ModelError(f"There is no model at {path}; give a Hugging Face directory or a .gguf file.")
    _check_names(checkpoint)
    return checkpoint


def _load_hf(directory: Path) -> Checkpoint:
    config = read_json(directory / "config.json")
    if config is None:
        raise ModelError(f"{directory} has no config.json, so it is not a Hugging Face model directory.")
    return Checkpoint(
        directory.resolve().name,
        config_from_hf(config, read_json(directory / "generation_config.json")),
        LazyTensors(_safetensors(directory)),
        directory,
    )


@dataclass(frozen=True, slots=True)
class _SafetensorsRows:
    """Mapped anew at each read, so that the pages go with what was read of them."""

    file: Path
    name: str
    shape: torch.Size

    def __getitem__(self, rows: slice) -> torch.Tensor:
        opened: Any
        with safe_open(self.file, framework="pt") as opened:
            part: torch.Tensor = opened.get_slice(self.name)[rows]
        return part


def _safetensors(directory: Path) -> dict[str, _SafetensorsRows]:
    files = sorted(directory.glob("*.safetensors"))
    index = read_json(directory / "model.safetensors.index.json")
    if index is not None:
        files = sorted({directory / name for name in index["weight_map"].values()})
    if not files:
        raise ModelError(f"{directory} has no .safetensors files; convert older .bin weights first.")
    tensors = {}
    for file in files:
        if not file.is_file():
            raise ModelError(f"{directory} lacks {file.name}, which its index names.")
        opened: Any
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                tensors[name] = _SafetensorsRows(file, name, torch.Size(opened.get_slice(name).get_shape()))
    return tensors


def read_json(path: Path) -> dict[str, Any] | None:
    """None if there is no such file."""
    if not path.is_file():
        return None
    content = json.loads(path.read_text(encoding="utf-8"))
    assert isinstance(content, dict)
    return content


def expected_names(config: ModelConfig) -> list[str]:
    """The names of the canonical state dict of a model, in the order of the forward pass."""
    names = ["model.embed_tokens.weight"]
    for layer in range(config.num_layers):
        names += [f"model.layers.{layer}.{name}" for name in _layer_names(config)]
    return [*names, "model.norm.weight", *([] if config.tie_word_embeddings else ["lm_head.weight"])]


def _layer_names(config: ModelConfig) -> list[str]:
    biased = {"q_proj": config.qkv_bias, "k_proj": config.qkv_bias, "v_proj": config.qkv_bias, "o_proj": config.o_bias}
    names = ["input_layernorm.weight"]
    for projection, bias in biased.items():
        names += [f"self_attn.{projection}.weight"] + [f"self_attn.{projection}.bias"] * bias
    names += ["self_attn.q_norm.weight", "self_attn.k_norm.weight"] * config.qk_norm
    names += ["post_attention_layernorm.weight"]
    names += ["pre_feedforward_layernorm.weight", "post_feedforward_layernorm.weight"] * config.sandwich_norms
    for projection in ("gate_proj", "up_proj", "down_proj"):
        names += [f"mlp.{projection}.weight"] + [f"mlp.{projection}.bias"] * config.mlp_bias
    return names


def _check_names(checkpoint: Checkpoint) -> None:
    """So that a missing tensor is one sentence at the start and not a KeyError later, and a wrong bias setting is noticed."""
    expected = set(expected_names(checkpoint.config))
    missing = sorted(expected - set(checkpoint.tensors))
    if missing:
        raise ModelError(f"The checkpoint lacks {len(missing)} tensors, {missing[0]} among them.")
    biases = sorted(name for name in set(checkpoint.tensors) - expected if name.endswith(".bias"))
    if biases:
        raise ModelError(f"The checkpoint has biases that its configuration does not tell of, {biases[0]} among them.")
