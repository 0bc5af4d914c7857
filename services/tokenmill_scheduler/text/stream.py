"""One request's output as text, token by token.

The text of an output is decode(prompt + output) less what it shares at its start with decode(prompt), where decode is the
tokenizer's own, special tokens skipped. So a character that begins in the prompt and ends in the output belongs to the output, as a
whole; one that the output does not complete is a U+FFFD of the prompt. After n tokens the stream has given out the part of that
text that no later token can change or take back.

A tokenizer with byte fallback decodes a whole run of byte tokens to U+FFFD, one a token, when any part of the run is not UTF-8. A
stream cannot wait for the end of a run: here only the invalid parts become U+FFFD, one each, never more than in the full decode.

Must not know: requests, gRPC.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tokenmill_scheduler.text.pieces import TokenPieces
from tokenmill_scheduler.text.stops import StopMatcher

_utf8 = codecs.getincrementaldecoder("utf-8")
# An incomplete UTF-8 character has at most three bytes, and the last three bytes alone tell where it begins.
_CONTEXT_BYTES = 3


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
    until `finish`. Costs the same for each token, wherever it stands.
    """

    def __init__(
        self,
        pieces: TokenPieces,
        prompt: Sequence[int],
        stop: Sequence[str] = (),
        include_stop: bool = False,
        stop_token_ids: Iterable[int] = (),
        min_tokens: int = 0,
    ) -> None:
        """`stop_token_ids` show no text; none of the first `min_tokens` tokens completes a stop string."""
        self._pieces = pieces
        self._hidden = frozenset(stop_token_ids)
        self._decoder = _utf8("replace")
        self._at_start = self._read_context(prompt)
        self._in_prompt_character = bool(self._decoder.getstate()[0])
        self._matcher = StopMatcher(stop, include_stop) if stop else None
        self._unstoppable = min_tokens

    def feed(self, token_ids: Sequence[int]) -> TextStep:
        """The text that `token_ids` complete. After a stop every token is beyond the end: no text, `stopped_after` 0."""
        if self._matcher is None:
            return TextStep(self._decode(token_ids))
        if self._matcher.stopped:
            return TextStep("", stopped_after=0)
        return self._feed_matcher(self._matcher, token_ids)

    def finish(self) -> str:
        """The text still held back; to be called once, at the end."""
        rest = self._decode_bytes(b"", final=True)
        if self._matcher is None:
            return rest
        return "" if self._matcher.stopped else self._matcher.finish() + rest

    def _feed_matcher(self, matcher: StopMatcher, token_ids: Sequence[int]) -> TextStep:
        texts = []
        for count, token_id in enumerate(token_ids, 1):
            texts.append(matcher.feed(self._decode((token_id,)), may_stop=count > self._unstoppable))
            if matcher.stopped:
                return TextStep("".join(texts), stopped_after=count)
        self._unstoppable -= min(self._unstoppable, len(token_ids))
        return TextStep("".join(texts))

    def _decode(self, token_ids: Sequence[int]) -> str:
        if self._hidden:
            token_ids = [token_id for token_id in token_ids if token_id not in self._hidden]
        if self._at_start:
            return self._decode_start(token_ids)
        return self._decode_bytes(self._pieces.join(token_ids))

    def _decode_start(self, token_ids: Sequence[int]) -> str:
        """As `_decode`, where no token has shown text yet."""
        first = next((i for i, token_id in enumerate(token_ids) if not self._pieces.is_skipped(token_id)), None)
        if first is None:
            return ""
        self._at_start = False
        start = self._pieces.at_start(token_ids[first])
        return self._decode_bytes(start + self._pieces.join(token_ids[first + 1 :]))

    def _decode_bytes(self, data: bytes, final: bool = False) -> str:
        text = self._decoder.decode(data, final)
        if self._in_prompt_character and text:
            self._in_prompt_character = False
            return text.removeprefix("\ufffd")
        return text

    def _read_context(self, prompt: Sequence[int]) -> bool:
        """Takes up the character that the prompt ends in, if it is incomplete; answers whether the prompt shows no text at all."""
        tail, at_start = b"", True
        for token_id in reversed(prompt):
            if self._pieces.is_skipped(token_id):
                continue
            at_start = False
            tail = self._pieces[token_id] + tail
            if len(tail) >= _CONTEXT_BYTES:
                break
        self._decoder.decode(tail[-_CONTEXT_BYTES:])
        return at_start
