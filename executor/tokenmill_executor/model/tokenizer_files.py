"""`tokenizer.json` and `tokenizer_config.json` of a model: as they lie in a Hugging Face directory, or built from GGUF metadata.

Must not know: who tokenizes with them, weights.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenmill_executor.model.config import ModelError
from tokenmill_executor.model.gguf_file import GgufFile
from tokenmill_executor.model.gguf_tokenizer import build_tokenizer

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
_TEMPLATE = "chat_template.jinja"


def tokenizer_files(source: Path | GgufFile) -> dict[str, bytes]:
    """By name. `tokenizer_config.json` has the special tokens, and the chat template if there is one. Raises ModelError."""
    return _from_gguf(source) if isinstance(source, GgufFile) else _from_directory(source)


def _from_directory(directory: Path) -> dict[str, bytes]:
    if not (directory / TOKENIZER).is_file():
        raise ModelError(f"{directory} has no {TOKENIZER}; convert its tokenizer with transformers' save_pretrained first.")
    files = {TOKENIZER: (directory / TOKENIZER).read_bytes()}
    if (directory / TOKENIZER_CONFIG).is_file():
        files[TOKENIZER_CONFIG] = (directory / TOKENIZER_CONFIG).read_bytes()
    if (directory / _TEMPLATE).is_file():
        # Newer directories keep the template in a file of its own.
        config = json.loads(files.get(TOKENIZER_CONFIG, b"{}"))
        config["chat_template"] = (directory / _TEMPLATE).read_text(encoding="utf-8")
        files[TOKENIZER_CONFIG] = _encode(config)
    return files


def _from_gguf(file: GgufFile) -> dict[str, bytes]:
    tokenizer, config = build_tokenizer(file)
    return {TOKENIZER: tokenizer.to_str().encode(), TOKENIZER_CONFIG: _encode(config)}


def _encode(config: dict[str, Any]) -> bytes:
    return json.dumps(config, ensure_ascii=False, indent=2).encode()
