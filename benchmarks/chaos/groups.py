"""A client with one request for several choices, which come as one stream; each choice is a request of its own in the `Book`.

Judging is not done here. Must not know: faults, processes, the database.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from tokenmill_client import AsyncClient, RequestNotDone, TokenmillError
from tokenmill_client.options import GenerateOptions
from tokenmill_client.records import FinishReason
from tokenmill_scheduler.core.choices import choice_id, choice_seed

from benchmarks.chaos.sent import Ask, Book, Sent

PAUSE_S = 0.1
_ENDS = {FinishReason.CANCELLED: "cancelled", FinishReason.EXPIRED: "expired", FinishReason.ERROR: "failed"}


def send_choices(book: Book, ask: Ask, n: int) -> list[Sent]:
    """Each choice, foretold from the seed that it derives."""
    asks = [replace(ask, request_id=choice_id(ask.request_id, at), seed=choice_seed(ask.seed, at)) for at in range(n)]
    return [book.send(one) for one in asks]


class GroupVisit:
    """`try_again` are the errors after which a client sends its request once more, under the same id."""

    def __init__(
        self,
        client: AsyncClient,
        choices: Sequence[Sent],
        rng: random.Random,
        clock: Callable[[], float],
        try_again: tuple[type[TokenmillError], ...],
    ) -> None:
        self._client = client
        self._choices = choices
        self._rng = rng
        self._clock = clock
        self._try_again = try_again

    async def read(self) -> None:
        """To the end of all; the stream takes itself up wherever each choice stands."""
        while not all(sent.ended for sent in self._choices):
            try:
                await self._stream()
            except self._try_again:
                await asyncio.sleep(PAUSE_S)
            except TokenmillError as error:
                self._choices[0].errors.append(f"{type(error).__name__}: {error}")
                for sent in self._choices:
                    sent.give_up(self._clock())

    async def cancel(self) -> None:
        """All choices, in the middle, while their stream is open."""
        reading = asyncio.create_task(self.read())
        await asyncio.wait([reading], timeout=self._rng.uniform(0.0, 2.0))
        if any(sent.accepted for sent in self._choices):
            for sent in self._choices:
                sent.cancelled = True
            await self._cancel()
        await reading

    async def _stream(self) -> None:
        ask = self._choices[0].ask
        options = GenerateOptions(
            request_id=ask.request_id, token_ids=ask.prompt, max_tokens=ask.max_tokens, seed=ask.seed, n=len(self._choices),
            detached=ask.detached,
        )  # fmt: skip
        for sent in self._choices:
            # One that is sent again begins anew.
            sent.tokens.clear()
        async with self._client.generate(**options) as stream:
            try:
                async for delta in stream:
                    self._choices[delta.choice].took(delta.first_index, delta.token_ids, delta.text, self._clock())
            except RequestNotDone:
                pass  # Of some choice: how each ended is asked below.
            for sent, output in zip(self._choices, stream.outputs, strict=True):
                assert output.finish_reason is not None
                sent.end(_ENDS.get(output.finish_reason, "done"), self._clock())

    async def _cancel(self) -> None:
        while True:
            try:
                await self._client.cancel(self._choices[0].ask.request_id, "enough")
                return
            except self._try_again:
                await asyncio.sleep(PAUSE_S)
