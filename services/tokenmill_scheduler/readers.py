"""Who reads which request's stream, here or through another scheduler: they come, are given what is committed, and leave.

Must not know: protobuf, SQL, how a request is changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from tokenmill_scheduler.core.events import Cancelled
from tokenmill_scheduler.core.request import TERMINAL
from tokenmill_scheduler.desk.errors import Unavailable
from tokenmill_scheduler.desk.port import Attachment
from tokenmill_scheduler.followers import Followers, ended
from tokenmill_scheduler.ledger.port import Ledger
from tokenmill_scheduler.ledger.records import StoredOutput, StoredRequest
from tokenmill_scheduler.live import RequestView
from tokenmill_scheduler.lookup import Lookup
from tokenmill_scheduler.loop import Loop
from tokenmill_scheduler.reads import read_ledger
from tokenmill_scheduler.streams import Feed, FeedReader, check_index

_NO_OUTPUT = StoredOutput(0, ())
_LEFT = "its client left"


@dataclass(frozen=True, slots=True)
class _Readable:
    """A request to be read, with its output from the ledger if it does not run here."""

    found: RequestView | StoredRequest
    output: StoredOutput = _NO_OUTPUT

    @property
    def num_tokens(self) -> int:
        """Those that may be told."""
        return self.found.feed.committed if isinstance(self.found, RequestView) else len(self.output.token_ids)


class Readers:
    """`followers` are those who read here what another scheduler runs."""

    def __init__(self, loop: Loop, ledger: Ledger, lookup: Lookup, followers: Followers) -> None:
        self._loop = loop
        self._ledger = ledger
        self._lookup = lookup
        self._followers = followers
        self._closed = False

    def close(self) -> None:
        """A reader's leaving cancels nothing any more."""
        self._closed = True

    def close_streams(self, reason: Unavailable) -> None:
        """Whoever reads is told `reason`, after what is committed."""
        self._loop.live.close_streams(reason)
        self._followers.close(reason)

    async def attach_all(self, next_indexes: Mapping[str, int]) -> tuple[Attachment, ...]:
        """See `Desk.attach_all`."""
        return await self._lookup.once_settled(partial(self._attach_all, next_indexes))

    async def _attach_all(self, next_indexes: Mapping[str, int]) -> tuple[Attachment, ...]:
        # All is looked up before anybody reads: to leave again would cancel what nobody else reads.
        while True:
            found = {request_id: await self._look_up_output(request_id) for request_id in next_indexes}
            if not any(self._has_come_here(readable) for readable in found.values()):
                break
        for request_id, next_index in next_indexes.items():
            check_index(next_index, found[request_id].num_tokens)
        return tuple([self._attach(found[request_id], next_index) for request_id, next_index in next_indexes.items()])

    async def _look_up_output(self, request_id: str) -> _Readable:
        found = await self._lookup.find(request_id)
        if isinstance(found, RequestView):
            return _Readable(found)
        return _Readable(found, await read_ledger(self._ledger.output, request_id))

    def _has_come_here(self, readable: _Readable) -> bool:
        """Whether it was taken over while the ledger was read."""
        found = readable.found
        return not isinstance(found, RequestView) and self._loop.live.runs(found.request.request_id)

    def _attach(self, readable: _Readable, next_index: int) -> Attachment:
        found, output = readable.found, readable.output
        request_id = found.request.request_id
        left = partial(self._reader_left, request_id)
        if isinstance(found, RequestView):
            reader = FeedReader(found.feed, next_index, left)
            self._loop.live.reader_came(request_id)
            return Attachment(found.request, tuple(found.feed.tokens[:next_index]), reader)
        if found.state not in TERMINAL:
            reader = self._followers.follow(found, output, next_index, left)
            return Attachment(found.request, output.token_ids[:next_index], reader)
        feed = Feed(output.token_ids, output.logprobs)
        feed.end(ended(found))
        return Attachment(found.request, output.token_ids[:next_index], FeedReader(feed, next_index, lambda: None))

    def _reader_left(self, request_id: str) -> None:
        """It may have come when another scheduler had the request."""
        if self._closed:
            return
        self._followers.left(request_id)
        if self._loop.live.reader_left(request_id, self._loop.clock()):
            self._loop.handle(Cancelled(request_id, _LEFT))

    # ---- through other schedulers ----

    def came_elsewhere(self, request_id: str) -> None:
        self._loop.live.read_elsewhere(request_id, self._loop.clock())

    def left_elsewhere(self, request_id: str) -> None:
        if self._loop.live.left_elsewhere(request_id):
            self._loop.handle(Cancelled(request_id, _LEFT))
