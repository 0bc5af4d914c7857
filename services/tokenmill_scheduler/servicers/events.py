"""A request's stream as events: Accepted, Deltas, Finished. On the hot path: once a commit and stream.

Text is T(n), what the request's TextStream has given out after n tokens, so a stream that begins at index k carries T(end) − T(k)
and a client that re-attaches there loses and repeats nothing. Every chunk becomes a Delta, also while its text is held back: a
client knows from the indexes where to attach again. What is held back to the end goes out in a Delta of no tokens, just before
Finished; as no index stands for it, a client that loses its stream between these two gets that Delta again and must drop it.

Must not know: gRPC calls, the desk beyond its records.
"""

from __future__ import annotations

from tokenmill.inference.v1.inference_pb2 import OutputOptions
from tokenmill.inference.v1.types_pb2 import StreamEvent

from tokenmill_scheduler.core.request import Request
from tokenmill_scheduler.desk.records import Chunk, Ended
from tokenmill_scheduler.servicers.convert import FINISH_REASONS, STATES, add_logprobs
from tokenmill_scheduler.text.stream import TextStream

# With twenty log probabilities a token this is half a megabyte: no reader's message limit is near.
MAX_DELTA_TOKENS = 2_048


class EventWriter:
    """Fills in events; messages are filled in place because copying one into another costs more than all the rest."""

    def __init__(self, request: Request, next_index: int, text: TextStream | None, token_ids: bool, choice: int = 0) -> None:
        """`text` stands at `next_index`; None when the client wants no text. `choice` is what the stream calls this one."""
        self._request = request
        self._choice = choice
        self._next_index = next_index
        self._text = text
        self._token_ids = token_ids

    def delta(self, event: StreamEvent, chunk: Chunk) -> None:
        count = len(chunk.token_ids)
        event.choice = self._choice
        delta = event.delta
        delta.first_index = chunk.first_index
        delta.token_count = count
        if self._token_ids:
            delta.token_ids.extend(chunk.token_ids)
        if self._text is not None:
            delta.text = self._text.feed(chunk.token_ids).text
        if chunk.logprobs and not self._request.logprobs_hidden:
            add_logprobs(delta, chunk.logprobs)
        self._next_index = chunk.first_index + count

    def held_text(self) -> str:
        """What was held back until now."""
        return "" if self._text is None else self._text.finish()

    def held(self, event: StreamEvent, text: str) -> None:
        """The Delta of `held_text`."""
        event.choice = self._choice
        event.delta.first_index = self._next_index
        event.delta.text = text

    def finished(self, event: StreamEvent, ended: Ended) -> None:
        event.choice = self._choice
        finished = event.finished
        finished.state = STATES[ended.state]
        finished.finish_reason = FINISH_REASONS[ended.finish_reason]
        finished.usage.prompt_tokens = len(self._request.prompt)
        finished.usage.output_tokens = ended.num_output_tokens
        finished.usage.cached_tokens = ended.cached_tokens
        finished.error = ended.error
        finished.error_code = ended.error_code


def accepted(event: StreamEvent, request: Request, num_choices: int = 1) -> None:
    event.accepted.request_id = request.request_id
    event.accepted.prompt_tokens = len(request.prompt)
    event.accepted.num_choices = num_choices


def split(chunk: Chunk) -> list[Chunk]:
    """Chunks of a size that a message can carry: one who attaches late finds all tokens so far in one."""
    if len(chunk.token_ids) <= MAX_DELTA_TOKENS:
        return [chunk]
    parts = [slice(start, start + MAX_DELTA_TOKENS) for start in range(0, len(chunk.token_ids), MAX_DELTA_TOKENS)]
    return [Chunk(chunk.first_index + part.start, chunk.token_ids[part], chunk.logprobs[part]) for part in parts]


def wants_text(output: OutputOptions | None) -> bool:
    """Absent options ask for text alone."""
    return output is None or output.text


def wants_token_ids(output: OutputOptions | None) -> bool:
    return output is not None and output.token_ids
