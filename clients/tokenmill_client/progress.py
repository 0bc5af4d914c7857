"""How far a stream has come, and the check that each output token comes exactly once, in order, across any reconnection.

Events in, deltas and output out. Must not know: protobuf, gRPC, asyncio, time.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenmill_client.errors import BrokenStream
from tokenmill_client.records import Accepted, Delta, Finished, Output, StreamEvent, TokenLogprobs, Usage


class ChoiceProgress:
    """One choice's part of a stream, from output token `first_index` on."""

    def __init__(self, name: str, first_index: int) -> None:
        """`name` is what errors call it."""
        self.next_index = first_index
        self.finished: Finished | None = None
        self._name = name
        self._first_index = first_index
        self._tail_taken = False
        self._comes_again = False
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []

    def reconnected(self) -> None:
        """The end of a choice that has finished comes again on the new connection."""
        self._comes_again = self.finished is not None

    def take(self, event: Delta | Finished) -> Delta | None:
        """The delta to pass on, if this event has one. Raises BrokenStream."""
        if self.finished is not None:
            self._take_again(event)
            return None
        if isinstance(event, Finished):
            self._finish(event)
            return None
        return self._advance(event)

    def output(self, request_id: str, choice: int, prompt_tokens: int) -> Output:
        return Output(
            request_id=request_id,
            first_index=self._first_index,
            text="".join(self._texts),
            token_ids=tuple(self._token_ids),
            logprobs=tuple(self._logprobs),
            finish_reason=self.finished.finish_reason if self.finished else None,
            usage=self.finished.usage if self.finished else Usage(prompt_tokens, self.next_index),
            choice=choice,
        )

    def _take_again(self, event: Delta | Finished) -> None:
        """Nothing more may come but, on a new connection, the text held back until the end and the end itself."""
        if not self._comes_again or (isinstance(event, Delta) and event.token_count):
            raise BrokenStream(f"An event came after the end of {self._name}.")
        self._comes_again = not isinstance(event, Finished)

    def _advance(self, delta: Delta) -> Delta | None:
        if delta.first_index != self.next_index:
            raise BrokenStream(f"{_capital(self._name)}: expected output token {self.next_index}, got {delta.first_index}.")
        for column in (delta.token_ids, delta.logprobs):
            if column and len(column) != delta.token_count:
                raise BrokenStream(f"{_capital(self._name)}: {len(column)} entries for {delta.token_count} tokens.")
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
                f"{_capital(self._name)} ended with {event.usage.output_tokens} output tokens, {self.next_index} were streamed."
            )
        self.finished = event


class Progress:
    """One request's stream, of one choice or of several, each from output token `first_index` on.

    After a lost connection call `reconnected`, attach from `next_indexes`, and go on with `take`.
    """

    def __init__(self, request_id: str, first_index: int = 0, accepted: bool = False) -> None:
        self.request_id = request_id
        # The request is known to be durable: take its stream up with Attach.
        self.accepted = accepted
        # As many as there are is known when it is accepted.
        self.choices = [ChoiceProgress(f"request {request_id}", first_index)]
        self._first_index = first_index
        self._prompt_tokens = 0
        self._greeted = self._has_begun = False
        # Every choice has finished.
        self.is_over = False

    @property
    def next_indexes(self) -> tuple[int, ...]:
        """Of each choice."""
        return tuple(choice.next_index for choice in self.choices)

    @property
    def next_index(self) -> int:
        """Of the only choice, or of the first."""
        return self.choices[0].next_index

    @property
    def endings(self) -> list[tuple[Finished, Output]]:
        """Of the choices that have finished."""
        return [(choice.finished, output) for choice, output in zip(self.choices, self.outputs, strict=True) if choice.finished]

    @property
    def outputs(self) -> tuple[Output, ...]:
        """One a choice."""
        return tuple(choice.output(self.request_id, number, self._prompt_tokens) for number, choice in enumerate(self.choices))

    @property
    def output(self) -> Output:
        """Of the only choice, or of the first."""
        return self.choices[0].output(self.request_id, 0, self._prompt_tokens)

    def reconnected(self) -> None:
        self._greeted = False
        for choice in self.choices:
            choice.reconnected()

    def take(self, event: StreamEvent) -> Delta | None:
        """The delta to pass on, if this event has one. Raises BrokenStream when the event must not come here."""
        if self.is_over:
            raise BrokenStream(f"An event came after the end of request {self.request_id}.")
        if isinstance(event, Accepted):
            self._greet(event)
            return None
        if not self._greeted:
            raise BrokenStream(f"The stream of request {self.request_id} did not begin with its acceptance.")
        # A choice that was asked for by its own id is the only one, whatever its number.
        number = event.choice if len(self.choices) > 1 else 0
        if number >= len(self.choices):
            raise BrokenStream(f"Request {self.request_id} has {len(self.choices)} choices, an event came for choice {number}.")
        delta = self.choices[number].take(event)
        if isinstance(event, Finished):
            self.is_over = all(choice.finished for choice in self.choices)
        return delta

    def _greet(self, event: Accepted) -> None:
        if self._greeted:
            raise BrokenStream(f"Request {self.request_id} was accepted twice on one stream.")
        if event.request_id != self.request_id:
            raise BrokenStream(f"Asked for request {self.request_id}, the stream is of {event.request_id}.")
        if not self._has_begun:
            self._begin(event.num_choices)
        elif event.num_choices != len(self.choices):
            raise BrokenStream(f"Request {self.request_id} had {len(self.choices)} choices, now it has {event.num_choices}.")
        self._greeted = self.accepted = True
        self._prompt_tokens = event.prompt_tokens

    def _begin(self, num_choices: int) -> None:
        self._has_begun = True
        if num_choices > 1:
            names = [f"choice {number} of request {self.request_id}" for number in range(num_choices)]
            self.choices = [ChoiceProgress(name, self._first_index) for name in names]


def _capital(words: str) -> str:
    return words[:1].upper() + words[1:]


def total_usage(outputs: Sequence[Output]) -> Usage:
    """Of all choices of a request: the prompt, which they have in common, is counted once."""
    return Usage(
        prompt_tokens=max(output.usage.prompt_tokens for output in outputs),
        output_tokens=sum(output.usage.output_tokens for output in outputs),
        cached_tokens=outputs[0].usage.cached_tokens,
    )
