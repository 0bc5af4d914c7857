"""Builds a tokenizer from a GGUF file's metadata: byte-level BPE ("gpt2") and sentencepiece BPE ("llama").

Source: the pre-tokenizers and rules of llama.cpp's `llama-vocab.cpp`, and the tokenizer.json files those were made after.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from tokenmill_executor.model.config import ModelError
from tokenmill_executor.model.gguf_file import GgufFile

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_SPACE = "▁"  # sentencepiece writes spaces so

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class _PreTokenizer:
    """How text is cut before merging.

    - pattern: what a piece is; None is GPT-2's own.
    - single_digits: cut digits out one by one first.
    - whole_words: a piece that is a token is taken whole, whatever the merges say.
    - adds_bos: unless the file says otherwise.
    - composes: characters are composed first (NFC).
    """

    pattern: str | None = None
    single_digits: bool = False
    whole_words: bool = False
    adds_bos: bool = False
    composes: bool = False


_GPT2_KIND = _PreTokenizer()
_SMOLLM_KIND = _PreTokenizer(single_digits=True)
_LLAMA3_KIND = _PreTokenizer(_LLAMA3, whole_words=True, adds_bos=True)
_QWEN2_KIND = _PreTokenizer(_QWEN2, composes=True)
_KINDS = {
    **dict.fromkeys(("default", "gpt-2", "phi-2", "olmo", "mpt"), _GPT2_KIND),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), _SMOLLM_KIND),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3"), _LLAMA3_KIND),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN2_KIND),
    "tekken": _PreTokenizer(_TEKKEN, whole_words=True, adds_bos=True),
}


def build_tokenizer(file: GgufFile) -> tuple[Tokenizer, dict[str, Any]]:
    """The tokenizer, and what `tokenizer_config.json` says of it. Raises ModelError for a kind that is not supported."""
    model = file.field("tokenizer.ggml.model")
    if model == "gpt2":
        tokenizer, adds_bos = _byte_level(file)
    elif model == "llama":
        tokenizer, adds_bos = _sentencepiece(file), True
    else:
        raise ModelError(f"GGUF tokenizers of type {model!r} are not supported; supported are 'gpt2' and 'llama'.")
    tokens = file.field("tokenizer.ggml.tokens")
    _add_special_tokens(tokenizer, tokens, file.field("tokenizer.ggml.token_type", []))
    config = _config(file, tokens, adds_bos)
    _add_bos_and_eos(tokenizer, config)
    return tokenizer, config


def _byte_level(file: GgufFile) -> tuple[Tokenizer, bool]:
    """The tokenizer, and whether it adds a beginning of sequence unless the file says otherwise."""
    name = file.field("tokenizer.ggml.pre", "default")
    kind = _KINDS.get(name)
    if kind is None:
        raise ModelError(f"The pre-tokenizer {name!r} of the GGUF file is not supported; supported are {', '.join(_KINDS)}.")
    tokens, merges = file.field("tokenizer.ggml.tokens"), file.field("tokenizer.ggml.merges", [])
    pairs = [(first, second) for first, _, second in (merge.partition(" ") for merge in merges)]
    tokenizer = Tokenizer(models.BPE(_vocabulary(tokens), pairs, ignore_merges=kind.whole_words))
    if kind.composes:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(_cuts(kind))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, kind.adds_bos


def _cuts(kind: _PreTokenizer) -> list[pre_tokenizers.PreTokenizer]:
    cuts: list[pre_tokenizers.PreTokenizer] = [pre_tokenizers.Digits(individual_digits=True)] if kind.single_digits else []
    if kind.pattern is not None:
        cuts.append(pre_tokenizers.Split(Regex(kind.pattern), behavior="isolated"))
    return [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind.pattern is None)]


def _sentencepiece(file: GgufFile) -> Tokenizer:
    """Bytes outside the vocabulary fall back to tokens such as <0x0A>; a space comes first unless the file says otherwise."""
    tokens, scores = file.field("tokenizer.ggml.tokens"), file.field("tokenizer.ggml.scores")
    if scores is None:
        raise ModelError("The GGUF file has a sentencepiece tokenizer without scores.")
    vocabulary = _vocabulary(tokens)
    unknown = tokens[file.field("tokenizer.ggml.unknown_token_id", 0)]
    merges = _merges_by_score(vocabulary, dict(zip(tokens, scores, strict=True)))
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefixed = file.field("tokenizer.ggml.add_space_prefix", True)
    steps = [normalizers.Prepend(_SPACE)] if prefixed else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    undo = [decoders.Strip(" ", 1, 0)] if prefixed else []
    tokenizer.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *undo])
    return tokenizer


def _vocabulary(tokens: Sequence[str]) -> dict[str, int]:
    return {token: index for index, token in enumerate(tokens)}


def _merges_by_score(vocabulary: dict[str, int], scores: dict[str, float]) -> list[tuple[str, str]]:
    """Every way to make a token of two others, best score first: what sentencepiece does at each step, as a list of merges."""
    merges = [
        (-scores[token], vocabulary[token[:cut]], vocabulary[token[cut:]], token[:cut], token[cut:])
        for token in vocabulary
        for cut in range(1, len(token))
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    ]
    merges.sort()
    return [(first, second) for *_, first, second in merges]


def _add_special_tokens(tokenizer: Tokenizer, tokens: Sequence[str], types: Sequence[int]) -> None:
    """Tokens that are matched whole in text. A control token is special: decoding can leave it out."""
    added = [
        AddedToken(token, special=kind != _USER_DEFINED, normalized=False)
        for token, kind in zip(tokens, types, strict=False)
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]
    tokenizer.add_special_tokens([token for token in added if token.special])
    tokenizer.add_tokens([token for token in added if not token.special])


def _config(file: GgufFile, tokens: Sequence[str], adds_bos: bool) -> dict[str, Any]:
    config: dict[str, Any] = {
        "add_bos_token": bool(file.field("tokenizer.ggml.add_bos_token", adds_bos)),
        "add_eos_token": bool(file.field("tokenizer.ggml.add_eos_token", False)),
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = file.field(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None and token_id < len(tokens):
            config[f"{name}_token"] = tokens[token_id]
    template = file.field("tokenizer.chat_template")
    return config if template is None else {**config, "chat_template": template}


def _add_bos_and_eos(tokenizer: Tokenizer, config: dict[str, Any]) -> None:
    bos = config.get("bos_token") if config["add_bos_token"] else None
    eos = config.get("eos_token") if config["add_eos_token"] else None
    if bos is None and eos is None:
        return
    tokenizer.post_processor = processors.TemplateProcessing(
        single=" ".join(part for part in (bos, "$A", eos) if part),
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in (bos, eos) if token],
    )
