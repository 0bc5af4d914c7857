"""Clients, each with one request at a time, who behave as clients do: they read, leave, come back, cancel, or look later.

What they are given goes into the `Book`, whatever it is; judging is not done here. Must not know: faults, processes, the database.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

from tokenmill_client import (
    AsyncClient,
    AsyncStream,
    DeadlineExceeded,
    QueueFull,
    RequestNotDone,
    RetryPolicy,
    TokenmillError,
    Unavailable,
)
from tokenmill_client.errors import RequestCancelled, RequestExpired
from tokenmill_client.options import SubmitOptions

from benchmarks.chaos.groups import PAUSE_S, GroupVisit, send_choices
from benchmarks.chaos.sent import Ask, Book, Sent

# Of one try. A client here tries again under the same id until it is answered: the run says when that has taken too long.
RETRY = RetryPolicy(call_limit_s=10.0, attach_limit_s=30.0)
CALL_TIMEOUT_S = 10.0
_TRY_AGAIN = (Unavailable, DeadlineExceeded, QueueFull)
_MAX_PROMPT_TOKENS = 100
# Of all prompts half begin with one of these texts: their requests wait for each other's blocks, and share them.
_BEGINNINGS = [tuple(32 + (number * place) % 95 for place in range(144)) for number in range(1, 9)]
_DEADLINE_S = 1.0
# Of all requests, those for several choices.
_GROUPS = 0.1
_MOST_CHOICES = 3


class Visit:
    """One client with one request."""

    def __init__(self, client: AsyncClient, sent: Sent, rng: random.Random, clock: Callable[[], float]) -> None:
        self._client = client
        self._sent = sent
        self._rng = rng
        self._clock = clock

    # ---- behaviours ------------------------------------------------------------------------------------------------------------

    async def read(self) -> None:
        """To the end."""
        while not self._sent.ended:
            await self._follow(self._sent.ask.max_tokens)

    async def come_back(self) -> None:
        """Leaves, and takes the stream up by itself at the index it needs."""
        while not self._sent.ended:
            await self._follow(len(self._sent.tokens) + self._rng.randrange(1, 100))
            await self._dawdle(0.3)

    async def leave(self) -> None:
        await self._follow(self._some())
        self._sent.abandoned = not self._sent.ended

    async def cancel(self) -> None:
        """In the middle, as another client would: while its own stream is open."""
        reading = asyncio.create_task(self.read())
        await asyncio.wait([reading], timeout=self._rng.uniform(0.0, 2.0))
        if self._sent.accepted:
            self._sent.cancelled = True
            await self._answered(lambda: self._client.cancel(self._sent.ask.request_id, "enough"))
        await reading

    async def look_later(self) -> None:
        await self._answered(lambda: self._client.submit(**_options(self._sent.ask)))
        self._sent.accepted = True
        await self._dawdle(2.0)
        await self.read()

    # ---- calls -----------------------------------------------------------------------------------------------------------------

    def _stream(self) -> AsyncStream:
        ask, have = self._sent.ask, len(self._sent.tokens)
        if self._sent.accepted:
            return self._client.attach(ask.request_id, have)
        return self._client.generate(**_options(ask), detached=ask.detached)

    async def _follow(self, until_tokens: int) -> None:
        """Reads until it has so many tokens, or the end if those are all; comes back when the connection is lost for long."""
        async with self._stream() as stream:
            try:
                async for delta in stream:
                    self._sent.took(delta.first_index, delta.token_ids, delta.text, self._clock())
                    if len(self._sent.tokens) >= until_tokens < self._sent.ask.max_tokens:
                        return
                self._sent.end("done", self._clock())
            except RequestNotDone as ending:
                self._sent.end(_state(ending), self._clock())
            except _TRY_AGAIN:
                await asyncio.sleep(PAUSE_S)
            except TokenmillError as error:
                self._fail(error)

    async def _answered(self, call: Callable[[], Awaitable[object]]) -> None:
        while True:
            try:
                await call()
                return
            except _TRY_AGAIN:
                await asyncio.sleep(PAUSE_S)
            except TokenmillError as error:
                self._fail(error)
                return

    def _fail(self, error: TokenmillError) -> None:
        """No client should ever see this; the request is given up."""
        self._sent.errors.append(f"{type(error).__name__}: {error}")
        self._sent.give_up(self._clock())

    def _some(self) -> int:
        return self._rng.randrange(1, self._sent.ask.max_tokens)

    async def _dawdle(self, at_most_s: float) -> None:
        await asyncio.sleep(self._rng.uniform(0.0, at_most_s))


# What clients do, whether the request is detached, and whether it has little time.
_BEHAVIOURS: tuple[tuple[Callable[[Visit], Awaitable[None]], bool, bool], ...] = (
    (Visit.read, True, False),
    (Visit.read, False, False),
    (Visit.read, True, True),
    (Visit.come_back, True, False),
    (Visit.come_back, True, False),
    (Visit.cancel, True, False),
    (Visit.cancel, False, False),
    (Visit.leave, False, False),
    (Visit.look_later, True, False),
    (Visit.look_later, True, False),
)


class Clients:
    """`address` gives each client's by its number.

    `run` keeps `count` of them busy until `leave`, and then until each has seen its request's end.
    """

    def __init__(self, address: Callable[[int], str], seed: int, count: int, max_tokens: int, book: Book) -> None:
        self._address = address
        self._seed = seed
        self._count = count
        self._max_tokens = max_tokens
        self._book = book
        self._leaving = False

    def leave(self) -> None:
        self._leaving = True

    async def run(self) -> None:
        await asyncio.gather(*(self._client(number) for number in range(self._count)))

    async def _client(self, number: int) -> None:
        rng = random.Random(f"{self._seed}/{number}")
        async with AsyncClient(self._address(number), timeout=CALL_TIMEOUT_S, retry=RETRY) as client:
            served = 0
            while not self._leaving:
                request_id = f"c{number}-{served}"
                await (self._visit_group if rng.random() < _GROUPS else self._visit)(client, rng, request_id)
                served += 1

    async def _visit(self, client: AsyncClient, rng: random.Random, request_id: str) -> None:
        behave, detached, hurried = rng.choice(_BEHAVIOURS)
        ask = draw_ask(rng, request_id, self._max_tokens, detached, _DEADLINE_S if hurried else None)
        await behave(Visit(client, self._book.send(ask), rng, self._book.clock))

    async def _visit_group(self, client: AsyncClient, rng: random.Random, request_id: str) -> None:
        ask = draw_ask(rng, request_id, self._max_tokens, detached=True)
        choices = send_choices(self._book, ask, rng.randint(2, _MOST_CHOICES))
        visit = GroupVisit(client, choices, rng, self._book.clock, _TRY_AGAIN)
        await rng.choice((visit.read, visit.read, visit.cancel))()


def draw_ask(rng: random.Random, request_id: str, max_tokens: int, detached: bool, deadline_s: float | None = None) -> Ask:
    own = tuple(rng.randrange(32, 127) for _ in range(rng.randrange(1, _MAX_PROMPT_TOKENS)))
    prompt = (*rng.choice(_BEGINNINGS), *own) if rng.random() < 0.5 else own
    return Ask(request_id, prompt, rng.randrange(max_tokens // 8, max_tokens), rng.randrange(1 << 32), detached, deadline_s)


def _options(ask: Ask) -> SubmitOptions:
    options = SubmitOptions(request_id=ask.request_id, token_ids=ask.prompt, max_tokens=ask.max_tokens, seed=ask.seed)
    if ask.deadline_s is not None:
        options["timeout"] = ask.deadline_s
    return options


def _state(ending: RequestNotDone) -> str:
    if isinstance(ending, RequestCancelled):
        return "cancelled"
    return "expired" if isinstance(ending, RequestExpired) else "failed"
