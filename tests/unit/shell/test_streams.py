"""Feeds and their readers: each index once, in order, only what is committed, one wake-up for all that gathered."""

from __future__ import annotations

import asyncio
import weakref

import pytest
from tokenmill_scheduler.core.plans import TokenLogprobs
from tokenmill_scheduler.core.request import FinishReason, State
from tokenmill_scheduler.desk.errors import IndexAhead, Unavailable
from tokenmill_scheduler.desk.records import Chunk, Ended
from tokenmill_scheduler.streams import Feed, FeedReader

DONE = Ended(State.DONE, FinishReason.STOP, 3)


def reader_of(feed: Feed, next_index: int = 0) -> FeedReader:
    return FeedReader(feed, next_index, lambda: None)


async def settle() -> None:
    """Lets every task that can run, run."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_reader_sees_committed_tokens_only() -> None:
    feed = Feed()
    reader = reader_of(feed)
    feed.append([1, 2, 3])
    waiting = asyncio.create_task(anext(reader))
    await settle()
    assert not waiting.done()
    feed.commit(2)
    assert await waiting == Chunk(0, (1, 2))
    feed.commit(3)
    assert await anext(reader) == Chunk(2, (3,))


async def test_c64_a_slow_reader_gets_what_gathered_in_one_chunk() -> None:
    feed = Feed()
    reader = reader_of(feed)
    for token in range(100):
        feed.append([token])
        feed.commit(token + 1)
    assert await anext(reader) == Chunk(0, tuple(range(100)))


async def test_commits_in_one_turn_wake_a_reader_once() -> None:
    feed = Feed()
    chunks = []

    async def read() -> None:
        async for item in reader_of(feed):
            chunks.append(item)

    task = asyncio.create_task(read())
    await settle()
    for token in range(3):
        feed.append([token])
        feed.commit(token + 1)
    feed.end(DONE)
    await task
    assert chunks == [Chunk(0, (0, 1, 2)), DONE]


async def test_readers_at_their_own_places() -> None:
    feed = Feed([5, 6, 7])
    assert await anext(reader_of(feed, 2)) == Chunk(2, (7,))
    assert await anext(reader_of(feed, 0)) == Chunk(0, (5, 6, 7))
    feed.end(DONE)
    assert await anext(reader_of(feed, 3)) == DONE


async def test_a_stream_is_over_after_its_end() -> None:
    feed = Feed([1, 2, 3])
    feed.end(DONE)
    assert [item async for item in reader_of(feed)] == [Chunk(0, (1, 2, 3)), DONE]


async def test_log_probabilities_go_with_their_tokens() -> None:
    feed = Feed()
    logprobs = tuple(TokenLogprobs(-float(index)) for index in range(3))
    feed.append([1, 2, 3], logprobs)
    feed.commit(3)
    assert await anext(reader_of(feed, 1)) == Chunk(1, (2, 3), logprobs[1:])


async def test_an_index_beyond_the_committed_tokens_is_ahead() -> None:
    feed = Feed([1, 2])
    feed.append([3])
    with pytest.raises(IndexAhead, match="index 3 was asked for, 2 tokens are out"):
        reader_of(feed, 3)
    assert feed.readers == 0


async def test_a_closed_feed_gives_what_is_committed_and_then_says_attach_again() -> None:
    feed = Feed([1])
    reader, waiting_reader = reader_of(feed), reader_of(feed, 1)
    waiting = asyncio.create_task(anext(waiting_reader))
    await settle()
    feed.close(Unavailable("shutting down; attach again", 1.0))
    with pytest.raises(Unavailable):
        await waiting
    assert await anext(reader) == Chunk(0, (1,))
    with pytest.raises(Unavailable, match="attach again"):
        await anext(reader)


async def test_leaving_is_told_once_also_before_the_first_item() -> None:
    feed = Feed()
    left: list[int] = []
    reader = FeedReader(feed, 0, lambda: left.append(feed.readers))
    assert feed.readers == 1
    await reader.aclose()
    await reader.aclose()
    assert left == [0]
    assert [item async for item in reader] == []


async def test_a_reader_that_has_gone_is_forgotten_when_the_next_one_waits() -> None:
    """A request may wait for hours, and clients look in again and again."""
    feed = Feed()
    waiter = feed.changed()
    gone = weakref.ref(waiter)
    waiter.cancel()
    del waiter
    feed.changed()
    assert gone() is None
    assert feed.waiting == 1
