"""Clients that come, go and read slowly, commits that lag or are refused, results that are late, lost or doubled, executors and
schedulers that die, also between a commit and its telling, in seeded random order.

Then the faults stop, and all must have ended well: every accepted request in one terminal state, its stored tokens the oracle's,
and every stream that was read, taken up again wherever it broke, the same tokens, each index once.
"""

from __future__ import annotations

import asyncio
import os
import random
from contextlib import suppress
from dataclasses import dataclass, field

import pytest
from tokenmill_scheduler.core.choices import choice_ids, further_choices
from tokenmill_scheduler.core.records import ResultArrived
from tokenmill_scheduler.core.request import TERMINAL, Request, State
from tokenmill_scheduler.core.scheduler import SchedulerConfig
from tokenmill_scheduler.desk import Attachment, Ended, IndexAhead, Unavailable, UnknownRequest
from tokenmill_scheduler.recovery import take_up

from tests.fakes.memory_ledger import MemoryLedger
from tests.fakes.shell import Shell, output_of, request, settle

STEPS = 300
# For thousands: TOKENMILL_SEEDS=5000 python -m pytest tests/unit/shell/test_random_lives.py
SEEDS = int(os.environ.get("TOKENMILL_SEEDS", "50"))
CONFIG = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=8)


@dataclass
class Watcher:
    """A client's stream of one request, over any number of attachments."""

    request_id: str
    tokens: list[int]
    # Turns of the event loop that it takes over each message.
    slowness: int = 0
    ended: Ended | None = None
    attachment: Attachment | None = None
    reading: asyncio.Task[None] | None = None

    async def attach(self, shell: Shell) -> None:
        self.attachment = await shell.service.attach(self.request_id, len(self.tokens))
        assert list(self.attachment.earlier) == self.tokens
        self.reading = asyncio.create_task(self._read(self.attachment))

    async def _read(self, attachment: Attachment) -> None:
        async for item in attachment.chunks:
            if isinstance(item, Ended):
                self.ended = item
            else:
                assert item.first_index == len(self.tokens)
                self.tokens += item.token_ids
            for _ in range(self.slowness):
                await asyncio.sleep(0)
        await attachment.chunks.aclose()

    async def leave(self) -> None:
        """As when the connection breaks."""
        assert self.reading is not None
        assert self.attachment is not None
        self.reading.cancel()
        await asyncio.gather(self.reading, return_exceptions=True)
        await self.attachment.chunks.aclose()


@dataclass
class World:
    rng: random.Random
    shell: Shell
    epoch: int = 1
    asked: dict[str, Request] = field(default_factory=dict)
    accepted: set[str] = field(default_factory=set)
    watchers: list[Watcher] = field(default_factory=list)
    calls: list[asyncio.Task[None]] = field(default_factory=list)

    async def submit(self) -> None:
        n, detached = self.rng.choice([1, 1, 2, 3]), self.rng.random() < 0.5
        new = request(f"r{len(self.asked)}", len(self.asked) + 1, self.rng.randint(1, 12), detached=detached, n=n, best_of=n)
        self.asked |= {choice.request_id: choice for choice in (new, *further_choices(new))}
        self.calls.append(asyncio.create_task(self._submit(new)))

    async def _submit(self, new: Request) -> None:
        with suppress(Unavailable):
            await self.shell.service.submit(new, b"d")
            self.accepted.update(choice_ids(new))

    async def attach(self) -> None:
        """To any request that its client knows to be accepted, from where it likes."""
        if self.accepted:
            request_id = self.rng.choice(sorted(self.accepted))
            known = self.shell.ledger.output(request_id).token_ids
            slowness = self.rng.choice([0, 0, 500])
            watcher = Watcher(request_id, list(known[: self.rng.randint(0, len(known))]), slowness)
            try:
                await watcher.attach(self.shell)
                self.watchers.append(watcher)
            except (IndexAhead, Unavailable):  # written, but not yet told; or the database is away
                pass

    async def leave(self) -> None:
        if self.watchers:
            watcher = self.watchers.pop(self.rng.randrange(len(self.watchers)))
            await watcher.leave()

    async def cancel(self) -> None:
        if self.accepted:
            request_id = self.rng.choice(sorted(self.accepted))
            self.calls.append(asyncio.create_task(self._cancel(request_id)))

    async def _cancel(self, request_id: str) -> None:
        with suppress(Unavailable):
            assert (await self.shell.service.cancel(request_id, "")).state in TERMINAL

    async def step(self) -> None:
        if self.shell.executor.unanswered:
            await self.shell.step()

    async def commit(self) -> None:
        self.shell.writer.commit()

    async def refuse_writes(self) -> None:
        """The database does, for a while."""
        self.shell.writer.refusals = self.rng.randint(1, 6)

    async def lose_result(self) -> None:
        """The executor has carried a plan out and its answer is lost: it is given up, and joins anew."""
        if self.shell.executor.unanswered:
            self.shell.executor.answer()
            await self.lose_executor()

    async def double_result(self) -> None:
        """The second copy is stale."""
        if self.shell.executor.unanswered:
            drive, result = self.shell.loop.drives["played"], self.shell.executor.answer()
            stale = self.shell.loop.load().stale_results
            self.shell.loop.answered(drive, result)
            self.shell.loop.handle(ResultArrived("played", result))
            assert self.shell.loop.load().stale_results > stale

    async def lose_executor(self) -> None:
        self.shell.loop.lost(self.shell.loop.drives["played"], "a fault")
        await settle()
        self.epoch += 1
        await self.shell.join(self.epoch)

    async def kill_after_save(self) -> None:
        """Between a commit and its telling."""
        self.shell.writer.save()
        await self.kill_scheduler()

    async def kill_scheduler(self) -> None:
        """What is not committed is gone, calls fail, streams break and are taken up again."""
        old = self.shell
        old.service.close()
        old.loop.fail(RuntimeError("killed"))
        assert old.loop.failure.exception() is not None
        for call in self.calls:
            call.cancel()
        await asyncio.gather(*self.calls, return_exceptions=True)
        for watcher in self.watchers:
            await watcher.leave()
        self.shell = Shell.over(old.ledger, config=CONFIG)
        self.shell.writer.hold = True
        take_up(self.shell.loop, tuple(self.shell.ledger.unfinished()))
        self.epoch += 1
        await self.shell.join(self.epoch)
        for watcher in self.watchers:
            if watcher.ended is None:
                await watcher.attach(self.shell)

    async def finish(self) -> None:
        """No more faults."""
        self.shell.writer.refusals = 0
        self.shell.writer.hold = False
        self.shell.writer.commit()
        await settle()
        while len(self.shell.loop.live):
            # What has ended is forgotten when its last reader, maybe a slow one, has gone.
            ended = all(self.shell.ledger.find(request_id).state in TERMINAL for request_id in self.accepted)  # type: ignore[union-attr]
            assert self.shell.executor.unanswered or ended, "requests live and nothing is planned"
            await (self.shell.step() if self.shell.executor.unanswered else settle())
        await asyncio.gather(*self.calls, return_exceptions=True)
        await asyncio.gather(*[w.reading for w in self.watchers if w.reading is not None and not w.reading.cancelled()])


def check_ends(world: World) -> None:
    for request_id in sorted(world.accepted):
        stored = world.shell.ledger.find(request_id)
        assert stored is not None, "accepted is durable"
        # The core may give up on a request that executors were lost with again and again; here that is chance.
        given_up = stored.state is State.FAILED and stored.preemptions >= 2
        assert stored.state in (State.DONE, State.CANCELLED) or given_up
        tokens = world.shell.ledger.output(request_id).token_ids
        expected = output_of(world.asked[request_id])
        assert tokens == (expected if stored.state is State.DONE else expected[: len(tokens)])
        ends = [move for move in world.shell.ledger.transitions(request_id) if move.after in TERMINAL]
        assert len(ends) == 1
    for watcher in world.watchers:
        assert watcher.ended is not None
        assert tuple(watcher.tokens) == world.shell.ledger.output(watcher.request_id).token_ids
        assert watcher.ended.num_output_tokens == len(watcher.tokens)


@pytest.mark.parametrize("seed", range(SEEDS))
async def test_random_lives_end_well(seed: int) -> None:
    rng = random.Random(seed)
    world = World(rng, Shell.over(MemoryLedger(), config=CONFIG))
    world.shell.writer.hold = True
    await world.shell.join()
    acts = [
        world.step,
        world.refuse_writes,
        world.commit,
        world.submit,
        world.attach,
        world.leave,
        world.cancel,
        world.lose_executor,
        world.lose_result,
        world.double_result,
        world.kill_scheduler,
        world.kill_after_save,
    ]
    for act in rng.choices(acts, weights=[40, 1, 20, 12, 10, 4, 2, 1, 1, 1, 1, 1], k=STEPS):
        await act()
        await settle()
    await world.finish()
    await settle()
    assert len(world.accepted) >= 3
    check_ends(world)
    with pytest.raises(UnknownRequest):
        await world.shell.service.status("nobody")
