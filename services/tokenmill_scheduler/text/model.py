"""A model's text side: tokenizer, chat template, incremental detokenisation and stop strings.

Made from the files an executor sends. Must not know: gRPC, the loop, the ledger. Safe to use from several threads at once.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from tokenmill_scheduler.core.request import Request
from tokenmill_scheduler.text.pieces import TokenPieces
from tokenmill_scheduler.text.stream import TextStep, TextStream

if TYPE_CHECKING:
    from tokenmill_scheduler.text.chat import ChatTemplate

__all__ = ["TextModel", "TextStep", "TextStream"]

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TextModel:
    def __init__(self, files: Mapping[str, bytes]) -> None:
        """`files`: `tokenizer.json` and, where the model has one, `tokenizer_config.json`, by name.

        Raises ValueError with a sentence when they are missing, unreadable, or of a kind whose text cannot be streamed.
        """
        self._tokenizer = _read_tokenizer(files)
        # A tokenizer.json may carry the settings of a training run; a prompt is never cut or filled up in silence.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._config = _read_config(files)
        self._pieces = TokenPieces(self._tokenizer)

    def encode(self, text: str) -> list[int]:
        """Token ids, with the special tokens that the tokenizer's post-processor adds."""
        return self._encode(text, add_special_tokens=True)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """`messages` have `role` and `content`. Raises ValueError with a sentence when there is no template or it refuses them."""
        if self._chat_template is None:
            raise ValueError("the model has no chat template; send the prompt as text or token ids")
        # The template writes the special tokens itself; the post-processor would begin the sequence twice.
        return self._encode(self._chat_template.render(messages), add_special_tokens=False)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # As a batch of one: `encode` keeps Python's lock to itself, for seconds with a text of a megabyte.
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    def stream(
        self,
        prompt: Sequence[int],
        stop: Sequence[str] = (),
        include_stop: bool = False,
        stop_token_ids: Iterable[int] = (),
        min_tokens: int = 0,
    ) -> TextStream:
        """The text of an output that follows `prompt`; see `TextStream`."""
        return TextStream(self._pieces, prompt, stop, include_stop, stop_token_ids, min_tokens)

    def stream_of(self, request: Request) -> TextStream:
        """The one stream that belongs to a request: who judges stop strings and who writes to clients must see the same text."""
        sampling = request.sampling
        return self.stream(request.prompt, request.stop, request.include_stop, sampling.stop_token_ids, sampling.min_tokens)

    @cached_property
    def longest_token(self) -> int:
        """In characters, at least: a text of more than n times as many has more than n tokens, unless it is normalised shorter."""
        return max(map(len, self._tokenizer.get_vocab()), default=1)

    @property
    def has_chat_template(self) -> bool:
        return _template_source(self._config) is not None

    @cached_property
    def _chat_template(self) -> ChatTemplate | None:
        """Compiled when first used: a broken template leaves text prompts working, and a restart does not wait for jinja2."""
        from tokenmill_scheduler.text.chat import ChatTemplate

        source = _template_source(self._config)
        return None if source is None else ChatTemplate(source, _special_tokens(self._config))


def _read_tokenizer(files: Mapping[str, bytes]) -> Tokenizer:
    if "tokenizer.json" not in files:
        raise ValueError("the executor sent no tokenizer.json")
    try:
        return Tokenizer.from_str(files["tokenizer.json"].decode())
    # `tokenizers` raises bare Exception.
    except Exception as error:
        raise ValueError(f"tokenizer.json cannot be read: {error}") from error


def _read_config(files: Mapping[str, bytes]) -> dict[str, Any]:
    try:
        config = json.loads(files.get("tokenizer_config.json", b"{}"))
    except ValueError as error:
        raise ValueError(f"tokenizer_config.json cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ValueError("tokenizer_config.json is no JSON object")
    return config


def _template_source(config: Mapping[str, Any]) -> str | None:
    """`chat_template` is one template, or a list of named ones of which `default` is for plain chat."""
    templates = config.get("chat_template")
    if isinstance(templates, list):
        templates = next((entry["template"] for entry in templates if entry["name"] == "default"), None)
    return templates if isinstance(templates, str) else None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """A special token is written as its text, or as an object with the text in `content`."""
    tokens = {}
    for name in _SPECIAL_TOKENS:
        token = config.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            tokens[name] = token
    return tokens
