"""How far a stream has come, and the check that each output token comes exactly once, in order, across any reconnection.

Events in, deltas and output out. Must not know: protobuf, gRPC, asyncio, time.
"""

from __future__ import annotations

from tokenmill_client.errors import BrokenStream
from tokenmill_client.records import Accepted, Delta, Finished, Output, StreamEvent, TokenLogprobs, Usage


class Progress:
    """One request's stream from output token `first_index` on.

    After a lost connection call `reconnected`, attach from `next_index`, and go on with `take`.
    """

    def __init__(self, request_id: str, first_index: int = 0, accepted: bool = False) -> None:
        self.request_id = request_id
        self.next_index = first_index
        # The request is known to be durable: take its stream up with Attach.
        self.accepted = accepted
        self.finished: Finished | None = None
        self._first_index = first_index
        self._prompt_tokens = 0
        self._greeted = False
        self._tail_taken = False
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []

    def reconnected(self) -> None:
        self._greeted = False

    def take(self, event: StreamEvent) -> Delta | None:
        """The delta to pass on, if this event has one. Raises BrokenStream when the event must not come here."""
        if self.finished is not None:
            raise BrokenStream(f"An event came after the end of request {self.request_id}.")
        if isinstance(event, Accepted):
            self._greet(event)
            return None
        if not self._greeted:
            raise BrokenStream(f"The stream of request {self.request_id} did not begin with its acceptance.")
        if isinstance(event, Finished):
            self._finish(event)
            return None
        return self._advance(event)

    @property
    def output(self) -> Output:
        usage = self.finished.usage if self.finished else Usage(self._prompt_tokens, self.next_index)
        return Output(
            request_id=self.request_id,
            first_index=self._first_index,
            text="".join(self._texts),
            token_ids=tuple(self._token_ids),
            logprobs=tuple(self._logprobs),
            finish_reason=self.finished.finish_reason if self.finished else None,
            usage=usage,
        )

    def _greet(self, event: Accepted) -> None:
        if self._greeted:
            raise BrokenStream(f"Request {self.request_id} was accepted twice on one stream.")
        if event.request_id != self.request_id:
            raise BrokenStream(f"Asked for request {self.request_id}, the stream is of {event.request_id}.")
        self._greeted = self.accepted = True
        self._prompt_tokens = event.prompt_tokens

    def _advance(self, delta: Delta) -> Delta | None:
        if delta.first_index != self.next_index:
            raise BrokenStream(f"Request {self.request_id}: expected output token {self.next_index}, got {delta.first_index}.")
        for column in (delta.token_ids, delta.logprobs):
            if column and len(column) != delta.token_count:
                raise BrokenStream(f"Request {self.request_id}: {len(column)} entries for {delta.token_count} tokens.")
        if delta.token_count == 0 and not self._take_tail():
            return None
        self.next_index += delta.token_count
        self._texts.append(delta.text)
        self._token_ids += delta.token_ids
        self._logprobs += delta.logprobs
        return delta

    def _take_tail(self) -> bool:
        """Text alone, held back until the end, has no index: when the connection was lost just after it, it comes again."""
        first, self._tail_taken = not self._tail_taken, True
        return first

    def _finish(self, event: Finished) -> None:
        if event.usage.output_tokens != self.next_index:
            raise BrokenStream(
                f"Request {self.request_id} ended with {event.usage.output_tokens} output tokens, {self.next_index} were streamed."
            )
        self.finished = event
