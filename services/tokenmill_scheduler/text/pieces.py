"""What each token adds to a text, as bytes: a table over the vocabulary, filled as tokens are seen.

Why bytes and not `tokenizers.decoders.DecodeStream`, which re-decodes a window of tokens as text: on output that is no valid UTF-8
(any model can make it) the window grows with every token, so a stream costs the square of its length; a context that ends inside a
character makes it raise; and it has no way to give out what is left at the end. Bytes need no window: the decoders of language
models add up token by token but for two things, an incomplete character and the space at the very start, and both are known here.

Must not know: requests, stop strings.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_REPLACEMENT = "\ufffd"
# Latin, accents, CJK, an emoji outside the basic plane, runs of spaces, line ends: what a decoder could treat in a special way.
_PROBE = "Hello, world! don't stop  .\n naïve 你好 🎉\t1 2"


def _byte_alphabet() -> dict[str, int]:
    """Character → byte of byte-level BPE: printable bytes stand for themselves, the rest for U+0100 on (GPT-2's table)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(plain)]
    return {chr(byte): byte for byte in plain} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()


class TokenPieces(dict[int, bytes]):
    """Token id → the bytes it adds after other text; empty for special tokens and ids the tokenizer does not know.

    `at_start(id)` is what it adds where nothing stands before it: some decoders drop the space that begins a text.
    Raises ValueError for a tokenizer whose decoder does not add up token by token, so that no text could be streamed.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._special = frozenset(i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special)
        kinds = set(_decoder_kinds(json.loads(tokenizer.to_str())["decoder"]))
        self._byte_level = "ByteLevel" in kinds
        self._byte_fallback = "ByteFallback" in kinds
        self._anchor = self._find_anchor()
        self._check()

    def __missing__(self, token_id: int) -> bytes:
        piece = self[token_id] = self._piece(token_id)
        return piece

    def is_skipped(self, token_id: int) -> bool:
        """Whether the tokenizer's decode passes over it: a special token, or none of its own."""
        return self._token(token_id) is None

    def at_start(self, token_id: int) -> bytes:
        text = self._tokenizer.decode([token_id])
        return self[token_id] if self._byte_level or _REPLACEMENT in text else text.encode()

    def join(self, token_ids: Iterable[int]) -> bytes:
        return b"".join([self[token_id] for token_id in token_ids])

    def _piece(self, token_id: int) -> bytes:
        token = self._token(token_id)
        if token is None:
            return b""
        if self._byte_level:
            return _bytes_of(token)
        if self._byte_fallback and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(byte[1])
        before = self._tokenizer.decode([self._anchor])
        return self._tokenizer.decode([self._anchor, token_id]).removeprefix(before).encode()

    def _token(self, token_id: int) -> str | None:
        return None if token_id in self._special else self._tokenizer.id_to_token(token_id)

    def _find_anchor(self) -> int:
        """A token that shows as text: what follows it does not stand at the start."""
        for token_id in range(self._tokenizer.get_vocab_size()):
            text = self._tokenizer.decode([token_id])
            if text and _REPLACEMENT not in text:
                return token_id
        raise ValueError("the tokenizer has no token that stands for text")

    def _check(self) -> None:
        ids = self._tokenizer.encode(_PROBE, add_special_tokens=False).ids
        whole = self._tokenizer.decode(ids)
        joined = b"".join([self.at_start(token_id) for token_id in ids[:1]] + [self[token_id] for token_id in ids[1:]])
        if whole != joined.decode(errors="replace"):
            raise ValueError("the tokenizer's decoder does not add up token by token, so its text cannot be streamed")


def _bytes_of(token: str) -> bytes:
    """A byte-level token's bytes. An added token may have characters outside the alphabet; it then stands for itself."""
    try:
        return bytes([_ALPHABET[character] for character in token])
    except KeyError:
        return token.encode()


def _decoder_kinds(decoder: dict[str, Any] | None) -> Iterator[str]:
    if decoder is not None:
        yield decoder["type"]
        for part in decoder.get("decoders", ()):
            yield from _decoder_kinds(part)
