"""The streams of a request's choices as one: accepted once, deltas mixed as they come, each choice finished, then the end.

Where the best are asked for, nothing is told before all have ended. Must not know: gRPC calls, the desk beyond its records.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from typing import Protocol, TypeVar

from tokenmill.inference.v1.types_pb2 import StreamEvent

from tokenmill_scheduler.core.request import Request
from tokenmill_scheduler.desk.errors import Unavailable
from tokenmill_scheduler.desk.port import Attachment, ChunkStream
from tokenmill_scheduler.desk.records import Chunk, Ended
from tokenmill_scheduler.ranking import Candidate, best
from tokenmill_scheduler.servicers.events import EventWriter, accepted, split
from tokenmill_scheduler.streams import check_index

SHUTDOWN_RETRY_S = 1.0


class Response(Protocol):
    """GenerateResponse, AttachResponse or CallEvent. A new one is filled in at once: it may be part of a message that goes out."""

    @property
    def event(self) -> StreamEvent: ...


R = TypeVar("R", bound=Response)
# Of a choice, the tokens that the client has already, and what the stream calls it.
MakeWriter = Callable[[Request, tuple[int, ...], int], Awaitable[EventWriter]]


def chunk_responses(writer: EventWriter, chunk: Chunk, new: Callable[[], R]) -> Iterator[R]:
    for part in split(chunk):
        writer.delta((response := new()).event, part)
        yield response


def end_responses(writer: EventWriter, ended: Ended, new: Callable[[], R]) -> Iterator[R]:
    """What was held back, then the end."""
    if text := writer.held_text():
        writer.held((response := new()).event, text)
        yield response
    writer.finished((response := new()).event, ended)
    yield response


async def stream_one(attachment: Attachment, make: MakeWriter, new: Callable[[], R]) -> AsyncGenerator[R, None]:
    """Of one choice, which is all of its request or was asked for by its own id."""
    writer = await make(attachment.request, attachment.earlier, attachment.request.choice)
    accepted((response := new()).event, attachment.request)
    yield response
    async for item in attachment.chunks:
        if isinstance(item, Ended):
            break
        # As `chunk_responses`, without a generator of its own: this is most of what a stream does.
        for part in split(item):
            writer.delta((response := new()).event, part)
            yield response
    else:
        raise Unavailable("the stream ended before the request did; attach again", SHUTDOWN_RETRY_S)
    for response in end_responses(writer, item, new):
        yield response


async def stream_choices(attachments: Sequence[Attachment], make: MakeWriter, new: Callable[[], R]) -> AsyncGenerator[R, None]:
    """Of choices that are all given out, each from the index it was attached at."""
    writers = [await make(attachment.request, attachment.earlier, place) for place, attachment in enumerate(attachments)]
    accepted((response := new()).event, attachments[0].request, len(attachments))
    yield response
    async with aclosing(merged([attachment.chunks for attachment in attachments])) as items:
        async for place, item in items:
            writer = writers[place]
            responses = end_responses(writer, item, new) if isinstance(item, Ended) else chunk_responses(writer, item, new)
            for response in responses:
                yield response


async def stream_best(
    attachments: Sequence[Attachment], next_indexes: Sequence[int], make: MakeWriter, new: Callable[[], R]
) -> AsyncGenerator[R, None]:
    """Of choices of which the best are given out, all attached at 0. Raises IndexAhead.

    `next_indexes` are those of what is given out, the best first.
    """
    accepted((response := new()).event, attachments[0].request, len(next_indexes))
    yield response
    outputs = await _collect([attachment.chunks for attachment in attachments])
    candidates = [Candidate(ended.state, output.logprobs) for output, ended in outputs]
    ranked = best(candidates, len(next_indexes))
    for place, next_index in zip(ranked, next_indexes, strict=True):
        check_index(next_index, len(outputs[place][0].token_ids))
    for rank, (place, next_index) in enumerate(zip(ranked, next_indexes, strict=True)):
        output, ended = outputs[place]
        writer = await make(attachments[place].request, output.token_ids[:next_index], rank)
        chunk = Chunk(next_index, output.token_ids[next_index:], output.logprobs[next_index:])
        for response in chunk_responses(writer, chunk, new) if chunk.token_ids else ():
            yield response
        for response in end_responses(writer, ended, new):
            yield response


async def merged(streams: Sequence[ChunkStream]) -> AsyncGenerator[tuple[int, Chunk | Ended], None]:
    """What each gives, with its place, as it comes. Nothing is taken ahead: a slow reader's tokens gather in the streams."""
    waiting = {asyncio.ensure_future(_next(stream)): place for place, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waiting.__getitem__):
                place, item = waiting[task], task.result()
                yield place, item
                del waiting[task]
                if not isinstance(item, Ended):
                    waiting[asyncio.ensure_future(_next(streams[place]))] = place
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def _next(stream: ChunkStream) -> Chunk | Ended:
    """Raises Unavailable."""
    async for item in stream:
        return item
    raise Unavailable("the stream ended before the request did; attach again", SHUTDOWN_RETRY_S)


async def _collect(streams: Sequence[ChunkStream]) -> list[tuple[Chunk, Ended]]:
    """All output of each, once all have ended."""
    parts: list[list[Chunk]] = [[] for _ in streams]
    endings: dict[int, Ended] = {}
    async with aclosing(merged(streams)) as items:
        async for place, item in items:
            if isinstance(item, Ended):
                endings[place] = item
            else:
                parts[place].append(item)
    return [(_joined(chunks), endings[place]) for place, chunks in enumerate(parts)]


def _joined(chunks: Sequence[Chunk]) -> Chunk:
    token_ids = tuple([token_id for chunk in chunks for token_id in chunk.token_ids])
    return Chunk(0, token_ids, tuple([entry for chunk in chunks for entry in chunk.logprobs]))
