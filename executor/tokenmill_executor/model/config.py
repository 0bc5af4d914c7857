"""What a Llama-family decoder is: the numbers that its weights and its arithmetic follow from.

Reads `config.json` of a Hugging Face directory; `gguf_file.py` builds the same record from GGUF metadata. Needs no torch.
Must not know: weights, devices, how anything is computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

SUPPORTED = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text")
ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
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
    """`windows` has one entry a layer: None for full attention, else how many positions (its own among them) a query sees.

    Layers with a window see the first `sinks` positions too. `local_layers` turn by `local_rope`. `attention_scale`
    multiplies the scores, by default 1 / sqrt(head_dim); `embedding_scale` the embeddings. With `sandwich_norms` what attention and
    MLP give is normed before it is added; `norm_offset` is added to the weights of all norms, which then multiply in float32.
    """

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
    sinks: int = 0
    local_rope: RopeConfig | None = None
    local_layers: frozenset[int] = frozenset()
    activation: str = "silu"
    attention_scale: float | None = None
    embedding_scale: float = 1.0
    sandwich_norms: bool = False
    norm_offset: float = 0.0

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


def with_windows(config: ModelConfig, window: int | None, sinks: int, max_model_len: int) -> ModelConfig:
    """No layer sees further than `window`, and all that see less than everything see the first `sinks` positions.

    A window as long as any sequence is none. Raises ModelError for sinks without a window.
    """
    asked = [min((w for w in (own, window) if w is not None), default=None) for own in config.windows]
    windows = tuple(None if w is None or w >= max_model_len else w for w in asked)
    if sinks and not any(windows):
        raise ModelError("Attention sinks are for layers with a sliding window shorter than the longest sequence: there is none.")
    return replace(config, windows=windows, sinks=sinks)


def config_from_hf(config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """From the contents of `config.json` and `generation_config.json`. Raises ModelError for what is not supported."""
    architecture = str(config.get("model_type"))
    _refuse_unsupported(architecture, config)
    layers, heads = int(config["num_hidden_layers"]), int(config["num_attention_heads"])
    attention_bias = bool(config.get("attention_bias", False)) and architecture in ("llama", "qwen3", "gemma3_text")
    gemma = architecture == "gemma3_text"
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
        rope=_rope_from_hf(config, _rope_parameters(config, "full_attention"), 1e6 if gemma else DEFAULT_ROPE_THETA),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", gemma)),
        qkv_bias=attention_bias or architecture == "qwen2",
        o_bias=attention_bias,
        mlp_bias=bool(config.get("mlp_bias", False)) and architecture == "llama",
        qk_norm=gemma or architecture == "qwen3",
        windows=_windows(architecture, config, layers),
        max_position_embeddings=int(config["max_position_embeddings"]),
        eos_token_ids=_eos_token_ids(config, generation or {}),
        **(_gemma(config, layers) if gemma else {}),
    )


def _gemma(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """What Gemma 3 does otherwise; older files give the local rotary base beside the other one."""
    local = _rope_parameters(config, "sliding_attention") if "rope_parameters" in config else {}
    theta = float(local.get("rope_theta") or config.get("rope_local_base_freq") or DEFAULT_ROPE_THETA)
    return {
        "local_rope": _rope_from_hf(config, {**local, "rope_theta": theta}, theta),
        "local_layers": frozenset(layer for layer, window in enumerate(_windows("gemma3_text", config, layers)) if window),
        "activation": "gelu_pytorch_tanh",
        "attention_scale": float(config.get("query_pre_attn_scalar", 256)) ** -0.5,
        "embedding_scale": float(config["hidden_size"]) ** 0.5,
        "sandwich_norms": True,
        "norm_offset": 1.0,
    }


def _refuse_unsupported(architecture: str, config: Mapping[str, Any]) -> None:
    if architecture not in SUPPORTED:
        raise ModelError(f"Models of type {architecture!r} are not supported; supported are {', '.join(SUPPORTED)}.")
    gemma = architecture == "gemma3_text"
    usual, key = ("gelu_pytorch_tanh", "hidden_activation") if gemma else ("silu", "hidden_act")
    if config.get(key, usual) != usual:
        raise ModelError(f"The activation {config[key]!r} is not supported, only {usual}.")
    if any(config.get(name) for name in ("final_logit_softcapping", "attn_logit_softcapping", "use_bidirectional_attention")):
        raise ModelError("Capped logits and attention in both directions are not supported.")
    if config.get("quantization_config"):
        raise ModelError("Quantised Hugging Face checkpoints are not supported; use the unquantised model or a GGUF file.")


def _head_dim(architecture: str, config: Mapping[str, Any]) -> int:
    if config.get("head_dim"):
        return int(config["head_dim"])
    # These defaults are not hidden / heads.
    defaults = {"qwen3": 128, "gemma3_text": 256}
    return defaults.get(architecture) or int(config["hidden_size"]) // int(config["num_attention_heads"])


def _rope_parameters(config: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """transformers 5 writes `rope_parameters` with `rope_theta` in it; older ones `rope_theta` beside a `rope_scaling`.

    Models whose kinds of layers turn differently have one set of parameters for each kind.
    """
    parameters: dict[str, Any] = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    return dict(parameters.get(kind) or {}) if any(isinstance(value, Mapping) for value in parameters.values()) else parameters


def _rope_from_hf(config: Mapping[str, Any], parameters: Mapping[str, Any], default_theta: float) -> RopeConfig:
    rope_type = parameters.get("rope_type", parameters.get("type", "default"))
    if rope_type not in ROPE_TYPES:
        raise ModelError(f"Rotary scaling {rope_type!r} is not supported; supported are {', '.join(ROPE_TYPES)}.")
    if parameters.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ModelError("Models that rotate only a part of each head are not supported.")
    original = parameters.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
    given: dict[str, Any] = {name: float(parameters[name]) for name in _ROPE_NUMBERS if parameters.get(name) is not None}
    return RopeConfig(
        theta=float(parameters.get("rope_theta") or config.get("rope_theta") or default_theta),
        type=rope_type,
        original_max_position_embeddings=int(original or config["max_position_embeddings"]),
        truncate=bool(parameters.get("truncate", True)),
        **given,
    )


def _windows(architecture: str, config: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    default = 4096 if architecture == "gemma3_text" else None
    window = config.get("sliding_window", default) if architecture != "llama" else None
    if architecture in ("qwen2", "qwen3") and not config.get("use_sliding_window", False):
        window = None
    if window is None:
        return (None,) * layers
    if architecture == "mistral":
        return (int(window),) * layers
    if architecture == "gemma3_text":
        period = int(config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or 6)
        slides = [(layer + 1) % period != 0 for layer in range(layers)]
    else:
        slides = [layer >= int(config.get("max_window_layers", 28)) for layer in range(layers)]
    kinds = config.get("layer_types") or ["sliding_attention" if slide else "full_attention" for slide in slides]
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
