"""Streams of requests that another scheduler has: their readers are fed from the ledger, which tells all that the other commits.

One task asks for all followed requests at once, whoever has them and however often that changes. When this scheduler takes a
request over, its feed, with its readers, becomes that of the live request. Must not know: protobuf, SQL, the core.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from tokenmill_scheduler.core.request import TERMINAL
from tokenmill_scheduler.desk.errors import Unavailable
from tokenmill_scheduler.desk.records import Ended
from tokenmill_scheduler.ledger.errors import LedgerUnavailable
from tokenmill_scheduler.ledger.port import Ledger
from tokenmill_scheduler.ledger.records import Command, StoredOutput, StoredRequest, Verb
from tokenmill_scheduler.streams import Feed, FeedReader

POLL_S = 0.05
OUTAGE_POLL_S = 0.5


@dataclass(slots=True)
class _Followed:
    """`stored` is as last seen. `told_s`: when the scheduler that has it last heard that it is read here."""

    stored: StoredRequest
    feed: Feed
    told_s: float


class Followers:
    def __init__(self, ledger: Ledger, tell: Callable[[Command], None], announce_s: float) -> None:
        """`tell` sends a command: whoever has a request that needs a reader hears every `announce_s` that it has one here."""
        self._ledger = ledger
        self._tell = tell
        self._announce_s = announce_s
        self._followed: dict[str, _Followed] = {}
        self._wanted = asyncio.Event()

    def follow(self, stored: StoredRequest, output: StoredOutput, next_index: int, left: Callable[[], None]) -> FeedReader:
        """A reader of the request's output, of which `output` is all so far. Raises IndexAhead."""
        request_id = stored.request.request_id
        followed = self._followed.get(request_id) or _Followed(stored, Feed(), told_s=0.0)
        # What is followed already may lag behind what this reader has seen elsewhere.
        followed.feed.bring_up_to(output.token_ids, output.logprobs)
        reader = FeedReader(followed.feed, next_index, left)
        self._followed[request_id] = followed
        self._wanted.set()
        return reader

    def left(self, request_id: str) -> None:
        """A reader has closed. After the last one nothing is followed, and a request that needs readers has one less."""
        followed = self._followed.get(request_id)
        if followed is None or followed.feed.readers:
            return
        del self._followed[request_id]
        if followed.feed.ended is None and not followed.stored.request.detached:
            self._command(followed, Verb.LEAVE)

    def hand_over(self, request_id: str) -> Feed | None:
        """The feed of a request that is this scheduler's from now on."""
        followed = self._followed.pop(request_id, None)
        return None if followed is None else followed.feed

    def close(self, reason: Unavailable) -> None:
        for followed in self._followed.values():
            followed.feed.close(reason)
        self._followed.clear()

    async def run(self) -> None:
        """Feeds the readers until cancelled."""
        while True:
            await self._wanted.wait()
            if not self._followed:
                self._wanted.clear()
                continue
            self._announce()
            await asyncio.sleep(POLL_S if await self._poll() else OUTAGE_POLL_S)

    async def _poll(self) -> bool:
        """False when the ledger is away: readers wait."""
        counts = {
            request_id: followed.feed.committed for request_id, followed in self._followed.items() if followed.feed.ended is None
        }
        try:
            progress = await asyncio.to_thread(self._ledger.progress, counts) if counts else {}
        except LedgerUnavailable:
            return False
        for request_id, (stored, output) in progress.items():
            followed = self._followed.get(request_id)
            # Left or handed over, and maybe followed again, while the ledger was asked.
            if followed is not None and followed.feed.committed == output.first_index:
                _feed(followed, stored, output)
        return True

    def _announce(self) -> None:
        now_s = asyncio.get_running_loop().time()
        for followed in self._followed.values():
            needs_reader = not followed.stored.request.detached and followed.feed.ended is None
            if needs_reader and now_s - followed.told_s >= self._announce_s:
                followed.told_s = now_s
                self._command(followed, Verb.READ)

    def _command(self, followed: _Followed, verb: Verb) -> None:
        if followed.stored.lease is not None:
            self._tell(Command(followed.stored.lease, followed.stored.request.request_id, verb))


def _feed(followed: _Followed, stored: StoredRequest, output: StoredOutput) -> None:
    followed.stored = stored
    followed.feed.append(output.token_ids, output.logprobs)
    followed.feed.commit(len(followed.feed.tokens))
    if stored.state in TERMINAL:
        followed.feed.end(ended(stored))


def ended(stored: StoredRequest) -> Ended:
    """How a stored request has ended."""
    assert stored.finish_reason is not None
    ending = (stored.finish_reason, stored.num_output_tokens, stored.error, stored.error_code, stored.cached_tokens)
    return Ended(stored.state, *ending)
