"""Checkpoints: the same model from a Hugging Face directory and from a GGUF file, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenmill_executor.model.config import ModelConfig, ModelError, RopeConfig, config_from_hf
from tokenmill_executor.model.rope import inverse_frequencies
from tokenmill_executor.model.tensors import LazyTensors
from tokenmill_executor.model.weights import expected_names, load_checkpoint

from tests.fakes.models import random_model
from tests.unit.model.gguf_files import add_rope_factors, write_model

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied-biases": ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "qwen2": ("qwen2", {}),
    "qwen3-head-80": ("qwen3", {"head_dim": 80}),
}


@pytest.mark.parametrize("name", MODELS)
def test_directory_and_gguf_file_give_the_same(name: str, tmp_path: Path) -> None:
    family, changes = MODELS[name]
    model = random_model(family, **changes)
    model.save_pretrained(tmp_path / "hf", max_shard_size="200KB")
    write_model(tmp_path / "model.gguf", family, model)
    hf, gguf = load_checkpoint(tmp_path / "hf"), load_checkpoint(tmp_path / "model.gguf")
    state = model.state_dict()
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 1
    assert gguf.config == dataclasses.replace(hf.config, rms_norm_eps=gguf.config.rms_norm_eps)
    assert gguf.config.rms_norm_eps == pytest.approx(hf.config.rms_norm_eps)
    for key in expected_names(hf.config):
        assert torch.equal(hf.tensors[key], state[key]), key
        assert torch.equal(gguf.tensors[key], state[key]), key
    assert set(expected_names(hf.config)) == set(gguf.tensors)


def test_rows_are_read_alone_and_the_pages_of_the_file_given_back(tmp_path: Path) -> None:
    """Rows of Q among them, which Llama's GGUF files have in another order."""
    model = random_model("llama")
    model.save_pretrained(tmp_path / "hf")
    write_model(tmp_path / "model.gguf", "llama", model)
    name = "model.layers.1.self_attn.q_proj.weight"
    whole = model.state_dict()[name]
    for path, file in (
        (tmp_path / "hf", tmp_path / "hf" / "model.safetensors"),
        (tmp_path / "model.gguf", tmp_path / "model.gguf"),
    ):
        tensors = load_checkpoint(path).tensors
        assert isinstance(tensors, LazyTensors)
        rows = tensors.rows(name)
        assert rows.shape == whole.shape
        for part in (slice(0, 1), slice(7, 50), slice(len(whole) - 3, len(whole))):
            assert torch.equal(rows[part], whole[part]), path
        assert resident_bytes(file) == 0, path


def resident_bytes(file: Path) -> int:
    """Of what this process has mapped of the file: other tests' may be mapped still."""
    size, mapped = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            mapped = line.endswith(f" {file}")
        elif mapped and line.startswith("Rss:"):
            size += int(line.split()[1]) * 1024
    return size


def test_rope_scaling_of_a_gguf_file(tmp_path: Path) -> None:
    import gguf

    model = random_model("llama")
    write_model(
        tmp_path / "yarn.gguf",
        "llama",
        model,
        rope_scaling_type=gguf.RopeScalingType.YARN,
        rope_scaling_factor=4.0,
        rope_scaling_orig_ctx_len=64,
    )
    config = load_checkpoint(tmp_path / "yarn.gguf").config
    assert config.rope == RopeConfig(10_000.0, "yarn", 4.0, 64)
    write_model(tmp_path / "plain.gguf", "llama", model)
    factors = [1.0] * 16 + [8.0] * 16
    add_rope_factors(tmp_path / "plain.gguf", factors)
    scaled = load_checkpoint(tmp_path / "plain.factors.gguf")
    plain = load_checkpoint(tmp_path / "plain.gguf")
    assert "rope_freqs.weight" not in scaled.tensors
    ratio = inverse_frequencies(plain.config.rope, 64) / inverse_frequencies(scaled.config.rope, 64)
    assert ratio.tolist() == pytest.approx(factors)


HF: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 100,
    "max_position_embeddings": 512,
}


def config(**changes: Any) -> ModelConfig:
    return config_from_hf({**HF, **changes})


def test_the_defaults_of_a_directory() -> None:
    plain = config()
    assert (plain.num_kv_heads, plain.head_dim, plain.rope.theta, plain.rms_norm_eps) == (4, 16, 10_000.0, 1e-6)
    assert (plain.tie_word_embeddings, plain.qkv_bias, plain.eos_token_ids, plain.windows) == (False, False, (), (None, None))
    assert config(model_type="qwen3").head_dim == 128
    assert config(model_type="mistral", sliding_window=9).windows == (9, 9)
    assert config(model_type="qwen2", sliding_window=9).windows == (None, None)
    assert config(model_type="qwen2", sliding_window=9, use_sliding_window=True, max_window_layers=1).windows == (None, 9)


def test_rope_as_older_directories_write_it() -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    scaled = config(rope_theta=5e5, rope_scaling=scaling)
    assert scaled.rope == RopeConfig(5e5, "yarn", 4.0, 128)
    assert scaled.max_model_len == 512
    assert config(rope_scaling={"type": "dynamic", "factor": 2.0}).max_model_len == 1024
    assert config(rope_theta=5e5, rope_scaling=None).rope.theta == 5e5


def test_gemma_3_as_older_directories_write_it() -> None:
    """As transformers reads the same file."""
    import transformers

    old = {
        **{key: value for key, value in HF.items() if key not in ("model_type", "rms_norm_eps")},
        "model_type": "gemma3_text",
        "num_hidden_layers": 4,
        "rope_theta": 5e5,
        "rope_local_base_freq": 3e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "sliding_window": 9,
        "sliding_window_pattern": 3,
    }
    found, expected = config_from_hf(old), transformers.Gemma3TextConfig(**old)
    written = config_from_hf(expected.to_dict())
    assert found == dataclasses.replace(written, eos_token_ids=found.eos_token_ids)
    assert (found.windows, found.local_layers) == ((9, 9, None, 9), frozenset({0, 1, 3}))
    assert found.local_rope is not None
    assert (found.rope.theta, found.rope.factor, found.local_rope.theta, found.local_rope.type) == (5e5, 8.0, 3e4, "default")
    assert (found.head_dim, found.attention_scale, found.tie_word_embeddings) == (256, 256**-0.5, True)


def test_end_of_sequence_tokens_of_both_files() -> None:
    assert config_from_hf({**HF, "eos_token_id": 7}, {"eos_token_id": [9, 7]}).eos_token_ids == (7, 9)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model_type": "gpt_oss"}, "'gpt_oss' are not supported; supported are llama"),
        ({"hidden_act": "gelu"}, "'gelu' is not supported"),
        ({"quantization_config": {"quant_method": "gptq"}}, "unquantised"),
        ({"rope_scaling": {"type": "longrope"}}, "'longrope' is not supported"),
        ({"partial_rotary_factor": 0.5}, "only a part of each head"),
        ({"model_type": "gemma3_text", "final_logit_softcapping": 30.0}, "Capped logits"),
        ({"num_key_value_heads": 3}, "cannot share 3"),
    ],
)
def test_an_unsupported_model_is_refused_with_a_sentence(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        config(**changes)


def test_a_path_without_a_model_is_refused_with_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no model at"):
        load_checkpoint(tmp_path / "nothing")
    with pytest.raises(ModelError, match=r"no config\.json"):
        load_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(HF))
    with pytest.raises(ModelError, match=r"no \.safetensors files"):
        load_checkpoint(tmp_path)
    (tmp_path / "text.gguf").write_text("not a model")
    with pytest.raises(ModelError, match="cannot be read as a GGUF file"):
        load_checkpoint(tmp_path / "text.gguf")


def test_missing_and_unexpected_tensors_are_told(tmp_path: Path) -> None:
    random_model("llama", attention_bias=True).save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**stored, "attention_bias": False}))
    with pytest.raises(ModelError, match="biases that its configuration does not tell of"):
        load_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**stored, "num_hidden_layers": 4}))
    with pytest.raises(ModelError, match=r"lacks 13 tensors, model\.layers\.3\."):
        load_checkpoint(tmp_path)


def test_a_gguf_file_of_another_architecture_is_refused(tmp_path: Path) -> None:
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "bert.gguf", "bert")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelError, match="architecture 'bert' are not supported"):
        load_checkpoint(tmp_path / "bert.gguf")
