"""Tokenizer files for the simulated runner: one token a byte, and a plain chat template.

Token ids 0 to 255 are the bytes of the text in UTF-8; three specials follow. Written as data, so that nothing here needs the
`tokenizers` library, which can load it.
"""

from __future__ import annotations

import json
from typing import Any

EOS_TOKEN_ID = 256
_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB_SIZE = 256 + len(_SPECIALS)

_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def tokenizer_files() -> dict[str, bytes]:
    """`tokenizer.json` and `tokenizer_config.json`."""
    return {"tokenizer.json": _encode(_tokenizer()), "tokenizer_config.json": _encode(_config())}


def _tokenizer() -> dict[str, Any]:
    vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_special(256 + index, content) for index, content in enumerate(_SPECIALS)],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }


def _config() -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": _SPECIALS[0],
        "clean_up_tokenization_spaces": False,
        "chat_template": _CHAT_TEMPLATE,
    }


def _special(token_id: int, content: str) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": token_id, "content": content} | flags


def _byte_characters() -> list[str]:
    """What byte-level BPE writes for each byte (GPT-2's `bytes_to_unicode`): its own character if visible, else one from 256 on."""
    seen = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    stand_ins = iter(range(256, 512))
    return [chr(byte if byte in seen else next(stand_ins)) for byte in range(256)]


def _encode(data: dict[str, Any]) -> bytes:
    return json.dumps(data, ensure_ascii=False, indent=1).encode()
