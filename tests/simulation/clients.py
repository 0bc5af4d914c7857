"""Clients of several schedulers in virtual time: each asks whichever it finds, and asks again when that one is unavailable."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any

from tokenmill_scheduler.core.choices import choice_ids, further_choices
from tokenmill_scheduler.core.request import TERMINAL, Request
from tokenmill_scheduler.desk.errors import IndexAhead, Refused, RequestEnded, Unavailable
from tokenmill_scheduler.desk.records import Ended
from tokenmill_scheduler.loop_desk import LoopDesk

from tests.fakes.shell import output_of, request
from tests.simulation.node import Node, call
from tests.simulation.virtual import unix_s

COME_AGAIN_S = 0.2


@dataclass(eq=False)
class Watcher:
    """A client's stream of one request, over any number of attachments, each token once. `slow_s`: for each message."""

    request: Request
    pick: Callable[[], Node | None]
    slow_s: float
    tokens: list[int] = field(default_factory=list)
    ended: Ended | None = None

    async def read(self) -> None:
        while self.ended is None:
            node = self.pick()
            try:
                if node is not None:
                    await self._read(node)
            except (Unavailable, IndexAhead):
                pass
            await asyncio.sleep(COME_AGAIN_S)

    async def _read(self, node: Node) -> None:
        attachment = await call(node, node.desk.attach(self.request.request_id, len(self.tokens)))
        assert list(attachment.earlier) == self.tokens
        try:
            async for item in attachment.chunks:
                if isinstance(item, Ended):
                    self.ended = item
                    return
                assert item.first_index == len(self.tokens)
                self.tokens += item.token_ids
                assert tuple(self.tokens) == output_of(self.request)[: len(self.tokens)]
                await asyncio.sleep(self.slow_s)
        finally:
            await attachment.chunks.aclose()


class Clients:
    """`pick` gives a scheduler that lives, if any. What was `asked` is known by id, what was `accepted` was answered."""

    def __init__(self, rng: random.Random, pick: Callable[[], Node | None]) -> None:
        self._rng = rng
        self._pick = pick
        self.asked: dict[str, Request] = {}
        self.accepted: set[str] = set()
        self.cancelled: set[str] = set()
        self.updates: dict[str, list[tuple[int | None, float | None]]] = {}
        self.watchers: dict[Watcher, asyncio.Task[None]] = {}
        self.calls: list[asyncio.Task[None]] = []

    # ---- acts ------------------------------------------------------------------------------------------------------------------

    def submit(self) -> None:
        rng, number = self._rng, len(self.asked)
        n = rng.choice([1, 1, 1, 2, 3])
        soon = rng.uniform(0.2, 8)
        limits = rng.choice([{}, {}, {}, {"deadline_s": unix_s() + soon}, {"queue_deadline_s": unix_s() + soon}])
        priority, detached = rng.randint(0, 3), rng.random() < 0.7
        new = request(f"r{number}", number + 1, rng.randint(1, 25), detached=detached, n=n, best_of=n, priority=priority, **limits)
        new = replace(new, arrival_s=unix_s(), prompt=(*new.prompt, *range(rng.choice([0, 0, 10, 60]))))
        self.asked |= {choice.request_id: choice for choice in (new, *further_choices(new))}
        self._call(self._submit(new))

    def watch(self) -> None:
        if self.accepted:
            watcher = Watcher(self.asked[self._any()], self._pick, self._rng.choice([0.0, 0.0, 0.3]))
            self.watchers[watcher] = asyncio.create_task(watcher.read())

    async def leave(self) -> None:
        if self.watchers:
            watcher = self._rng.choice(list(self.watchers))
            await self.end(watcher)
            del self.watchers[watcher]

    def cancel(self) -> None:
        if self.accepted:
            request_id = self._any()
            self.cancelled.update(choice_ids(self.asked[request_id]))
            self._call(self._cancel(request_id))

    def update(self) -> None:
        if self.accepted:
            request_id = self._any()
            deadline_s = unix_s() + self._rng.uniform(0.2, 8) if self._rng.random() < 0.3 else None
            change = self._rng.randint(0, 9), deadline_s
            for choice in choice_ids(self.asked[request_id]):
                self.updates.setdefault(choice, []).append(change)
            self._call(self._update(request_id, *change))

    async def end(self, watcher: Watcher) -> None:
        self.watchers[watcher].cancel()
        await asyncio.gather(self.watchers[watcher], return_exceptions=True)

    # ---- calls -----------------------------------------------------------------------------------------------------------------

    async def _submit(self, new: Request) -> None:
        if await self._until_answered(lambda desk: desk.submit(new, b"d"), tries=4):
            self.accepted.update(choice_ids(new))

    async def _cancel(self, request_id: str) -> None:
        async def cancel(desk: LoopDesk) -> None:
            assert (await desk.cancel(request_id, "")).state in TERMINAL
            for choice in choice_ids(self.asked[request_id]):
                assert (await desk.status(choice)).stored.state in TERMINAL, "a cancel was answered, and it has not ended"

        await self._until_answered(cancel)

    async def _update(self, request_id: str, priority: int | None, deadline_s: float | None) -> None:
        async def update(desk: LoopDesk) -> None:
            updated = (await desk.update(request_id, priority, deadline_s)).stored.request
            # Of several choices the first may have ended before.
            assert updated.n > 1 or updated.priority in [asked for asked, _ in self.updates[request_id]]

        await self._until_answered(update)

    async def _until_answered(self, ask: Callable[[LoopDesk], Coroutine[Any, Any, object]], tries: int = 10) -> bool:
        for _ in range(tries):
            try:
                if (node := self._pick()) is not None:
                    await call(node, ask(node.desk))
                    return True
            except RequestEnded:
                return True
            except (Unavailable, Refused):
                pass
            await asyncio.sleep(COME_AGAIN_S)
        return False

    def _call(self, call: Coroutine[Any, Any, None]) -> None:
        self.calls.append(asyncio.create_task(call))

    def _any(self) -> str:
        """One of the latest accepted, so that most have not ended."""
        return self._rng.choice(sorted(self.accepted, key=lambda name: list(self.asked).index(name))[-12:])
