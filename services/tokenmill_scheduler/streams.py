"""Committed output tokens on their way to readers. No queue per reader: each has a cursor into the request's one list of tokens.

A reader that is slower than the model finds more tokens at its cursor, so slow readers coalesce by nature and hold no memory of
their own. Used on the event loop's thread. Must not know: protobuf, the core, the ledger.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Self

from tokenmill_scheduler.core.plans import TokenLogprobs
from tokenmill_scheduler.desk.errors import IndexAhead, Unavailable
from tokenmill_scheduler.desk.records import Chunk, Ended


class Feed:
    """The output of one live request: `tokens` as generated, of which readers may see the first `committed`.

    `logprobs` is empty or has one entry a token. `ended` is set when the end is committed. `takes` counts what readers have taken.
    """

    __slots__ = ("_closed", "_waiters", "committed", "ended", "logprobs", "readers", "takes", "tokens")

    def __init__(self, tokens: Sequence[int] = (), logprobs: Sequence[TokenLogprobs] = ()) -> None:
        self.tokens = list(tokens)
        self.logprobs = list(logprobs)
        self.committed = len(self.tokens)
        self.ended: Ended | None = None
        self.readers = 0
        self.takes = 0
        self._closed: Unavailable | None = None
        # One a reader that waits, until the next change. (An event that is set and cleared again takes three times the calls.)
        self._waiters: list[asyncio.Future[None]] = []

    def append(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] = ()) -> None:
        """Generated, not yet to be seen."""
        self.tokens.extend(token_ids)
        self.logprobs.extend(logprobs)

    def bring_up_to(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> None:
        """All output so far of a request whose tokens are made elsewhere: it is durable."""
        self.append(token_ids[len(self.tokens) :], logprobs[len(self.logprobs) :])
        self.commit(len(self.tokens))

    def commit(self, num_tokens: int) -> None:
        """The first `num_tokens` are durable."""
        assert self.committed <= num_tokens <= len(self.tokens)
        self.committed = num_tokens
        self._wake()

    def end(self, ended: Ended) -> None:
        """The end is durable."""
        self.ended = ended
        self._wake()

    def close(self, reason: Unavailable) -> None:
        """Readers get what is committed, then `reason`."""
        self._closed = reason
        self._wake()

    def read(self, cursor: int) -> Chunk | Ended | None:
        """What a reader at `cursor` gets next; None when it must wait. Raises Unavailable when closed."""
        if cursor < self.committed:
            end = self.committed
            return Chunk(cursor, tuple(self.tokens[cursor:end]), tuple(self.logprobs[cursor:end]))
        if self.ended is not None:
            return self.ended
        if self._closed is not None:
            raise self._closed
        return None

    @property
    def waiting(self) -> int:
        """How many readers have taken all there is and wait for more."""
        return sum(not waiter.cancelled() for waiter in self._waiters)

    def changed(self) -> asyncio.Future[None]:
        """Done at the next change: a reader looks before it waits, so it misses nothing."""
        waiter = asyncio.get_running_loop().create_future()
        if self._waiters:
            # Of those that have gone: where nothing changes for long, others may come and go without end.
            self._waiters = [other for other in self._waiters if not other.cancelled()]
        self._waiters.append(waiter)
        return waiter

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.cancelled():
                waiter.set_result(None)


class FeedReader:
    """A `ChunkStream` over a feed. `left` is called once, when the reader closes."""

    def __init__(self, feed: Feed, next_index: int, left: Callable[[], None]) -> None:
        """Raises IndexAhead when `next_index` is beyond what is committed."""
        check_index(next_index, feed.committed)
        self._feed = feed
        self._cursor = next_index
        self._left: Callable[[], None] | None = left
        self._over = False
        feed.readers += 1

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk | Ended:
        if self._over:
            raise StopAsyncIteration
        while (item := self._feed.read(self._cursor)) is None:
            await self._feed.changed()
        self._feed.takes += 1
        if isinstance(item, Ended):
            self._over = True
        else:
            self._cursor += len(item.token_ids)
        return item

    async def aclose(self) -> None:
        self._over = True
        if self._left is not None:
            left, self._left = self._left, None
            self._feed.readers -= 1
            left()


def check_index(next_index: int, num_tokens: int) -> None:
    if next_index > num_tokens:
        raise IndexAhead(f"index {next_index} was asked for, {num_tokens} tokens are out")
