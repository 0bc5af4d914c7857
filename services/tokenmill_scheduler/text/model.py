"""A model's text side: tokenizer, chat template, incremental detokenisation and stop strings. (Contract.)"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TextStep:
    """What feeding tokens to a TextStream gave.

    `stopped_after` is the number of the fed tokens up to and with the one that completed a stop string, None if none did; `text` is
    then cut where the stop starts (or ends, with include_stop).
    """

    text: str
    stopped_after: int | None = None


class TextStream:
    """One request's output as text: tokens in, text deltas out.

    A pure function of prompt, stop strings and the tokens fed so far, so that any two streams over the same tokens give the same
    text, however the tokens were chunked. Text that might still become a stop string, or an incomplete character, is held back
    until `finish`.
    """

    def feed(self, token_ids: Sequence[int]) -> TextStep:
        raise NotImplementedError

    def finish(self) -> str:
        """The text still held back."""
        raise NotImplementedError


class TextModel:
    """Made from the files an executor sends."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        raise NotImplementedError

    def encode(self, text: str) -> list[int]:
        raise NotImplementedError

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Raises ValueError with a sentence when there is no template or it refuses the messages."""
        raise NotImplementedError

    def stream(self, prompt: Sequence[int], stop: Sequence[str] = (), include_stop: bool = False) -> TextStream:
        raise NotImplementedError

    @property
    def has_chat_template(self) -> bool:
        raise NotImplementedError
