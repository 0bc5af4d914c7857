"""What a Llama-family decoder is: the numbers that its weights and its arithmetic follow from.

Reads `config.json` of a Hugging Face directory; `gguf_file.py` builds the same record from GGUF metadata. Needs no torch.
Must not know: weights, devices, how anything is computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SUPPORTED = ("llama", "mistral", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")
DEFAULT_ROPE_THETA = 10_000.0
_ROPE_NUMBERS = (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
)


class ModelError(ValueError):
    """A model that cannot be loaded. Its text is one sentence for the operator."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: base and scaling, with the names of transformers' `rope_parameters`.

    `freq_factors`, [head_dim / 2], divide the inverse frequencies: how GGUF files write Llama 3's scaling.
    """

    theta: float = DEFAULT_ROPE_THETA
    type: str = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    freq_factors: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """`windows` has one entry a layer: None for full attention, else how many positions (its own among them) a query sees."""

    architecture: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ModelError(f"{self.num_heads} attention heads cannot share {self.num_kv_heads} key-value heads evenly.")
        if self.head_dim % 2:
            raise ModelError(f"Rotary embeddings need an even head size, not {self.head_dim}.")
        if len(self.windows) != self.num_layers:
            raise ModelError(f"The model has {self.num_layers} layers but says of {len(self.windows)} how far they attend.")

    @property
    def max_model_len(self) -> int:
        """Most positions the rotary embedding is made for."""
        if self.rope.type == "dynamic":
            return int(self.max_position_embeddings * self.rope.factor)
        if self.rope.type == "yarn":
            return max(self.max_position_embeddings, int(self.rope.original_max_position_embeddings * self.rope.factor))
        return self.max_position_embeddings


def config_from_hf(config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """From the contents of `config.json` and `generation_config.json`. Raises ModelError for what is not supported."""
    architecture = str(config.get("model_type"))
    _refuse_unsupported(architecture, config)
    layers, heads = int(config["num_hidden_layers"]), int(config["num_attention_heads"])
    attention_bias = bool(config.get("attention_bias", False)) and architecture in ("llama", "qwen3")
    return ModelConfig(
        architecture=architecture,
        hidden_size=int(config["hidden_size"]),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=_head_dim(architecture, config),
        intermediate_size=int(config["intermediate_size"]),
        vocab_size=int(config["vocab_size"]),
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=_rope_from_hf(config),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=attention_bias or architecture == "qwen2",
        o_bias=attention_bias,
        mlp_bias=bool(config.get("mlp_bias", False)) and architecture == "llama",
        qk_norm=architecture == "qwen3",
        windows=_windows(architecture, config, layers),
        max_position_embeddings=int(config["max_position_embeddings"]),
        eos_token_ids=_eos_token_ids(config, generation or {}),
    )


def _refuse_unsupported(architecture: str, config: Mapping[str, Any]) -> None:
    if architecture not in SUPPORTED:
        raise ModelError(f"Models of type {architecture!r} are not supported; supported are {', '.join(SUPPORTED)}.")
    if config.get("hidden_act", "silu") != "silu":
        raise ModelError(f"The activation {config['hidden_act']!r} is not supported, only silu.")
    if config.get("quantization_config"):
        raise ModelError("Quantised Hugging Face checkpoints are not supported; use the unquantised model or a GGUF file.")


def _head_dim(architecture: str, config: Mapping[str, Any]) -> int:
    if config.get("head_dim"):
        return int(config["head_dim"])
    # Qwen3's default is not hidden / heads.
    return 128 if architecture == "qwen3" else int(config["hidden_size"]) // int(config["num_attention_heads"])


def _rope_from_hf(config: Mapping[str, Any]) -> RopeConfig:
    """transformers 5 writes `rope_parameters` with `rope_theta` in it; older ones `rope_theta` beside a `rope_scaling`."""
    parameters: dict[str, Any] = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope_type = parameters.get("rope_type", parameters.get("type", "default"))
    if rope_type not in ROPE_TYPES:
        raise ModelError(f"Rotary scaling {rope_type!r} is not supported; supported are {', '.join(ROPE_TYPES)}.")
    if parameters.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ModelError("Models that rotate only a part of each head are not supported.")
    original = parameters.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
    given: dict[str, Any] = {name: float(parameters[name]) for name in _ROPE_NUMBERS if parameters.get(name) is not None}
    return RopeConfig(
        theta=float(parameters.get("rope_theta") or config.get("rope_theta") or DEFAULT_ROPE_THETA),
        type=rope_type,
        original_max_position_embeddings=int(original or config["max_position_embeddings"]),
        truncate=bool(parameters.get("truncate", True)),
        **given,
    )


def _windows(architecture: str, config: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    window = config.get("sliding_window") if architecture != "llama" else None
    if architecture in ("qwen2", "qwen3") and not config.get("use_sliding_window", False):
        window = None
    if window is None:
        return (None,) * layers
    if architecture == "mistral":
        return (int(window),) * layers
    first = int(config.get("max_window_layers", 28))
    kinds = config.get("layer_types") or ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    return tuple(int(window) if kind == "sliding_attention" else None for kind in kinds)


def _eos_token_ids(*configs: Mapping[str, Any]) -> tuple[int, ...]:
    """All end-of-sequence ids that any of the files names: chat models end turns with one that config.json may not have."""
    ids: dict[int, None] = {}
    for config in configs:
        eos = config.get("eos_token_id")
        for token_id in eos if isinstance(eos, list) else [eos]:
            if token_id is not None:
                ids[int(token_id)] = None
    return tuple(ids)
