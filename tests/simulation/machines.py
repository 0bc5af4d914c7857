"""Executor processes in virtual time, and the links by which schedulers drive them: the real ones, over a session without network.

A machine takes whoever comes with a higher epoch and fences the one before. That no two schedulers ever have the same epoch of an
executor is checked here.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

from tokenmill_scheduler.core.plans import Plan, Result
from tokenmill_scheduler.link import Backoff, ExecutorLink, LinkOwner
from tokenmill_scheduler.session import Fenced, Session, SessionLost
from tokenmill_scheduler.wire import ExecutorFacts, Standing

from tests.fakes.shell import PlayedExecutor


class Machine:
    """`rough`: how often an answer to a plan is lost, or comes twice, which ends the session."""

    def __init__(self, name: str, total_blocks: int, rng: random.Random) -> None:
        self.name = name
        self.address = f"at {name}"
        self.rng = rng
        self.up = True
        self.rough = 0.0
        self.session: MachineSession | None = None
        self.drivers: dict[int, LinkOwner] = {}
        self._total_blocks = total_blocks
        self.executor = PlayedExecutor(name, total_blocks)
        self._epoch = 0

    @property
    def facts(self) -> ExecutorFacts:
        return replace(self.executor.facts, epoch=self._epoch)

    def open(self, session: MachineSession, owner: LinkOwner) -> Standing:
        if session.epoch <= self._epoch:
            raise SessionLost(f"epoch {session.epoch} is stale")
        assert session.epoch not in self.drivers, "two schedulers have one epoch"
        self.drivers[session.epoch] = owner
        self._end(Fenced("a higher epoch"))
        self._epoch, self.session = session.epoch, session
        return Standing(self.executor.drive(session.epoch).blocks)

    def cut(self) -> None:
        """The connection breaks; the process lives."""
        self._end(SessionLost("the connection broke"))

    def crash(self) -> None:
        self.up = False
        self._end(SessionLost("the executor died"))

    def start(self) -> None:
        """A new process, without memory."""
        self.up, self._epoch = True, 0
        self.executor = PlayedExecutor(self.name, self._total_blocks)

    def _end(self, error: Exception) -> None:
        if self.session is not None:
            self.session.end(error)
            self.session = None

    async def run(self) -> None:
        """Steps until cancelled."""
        while True:
            await asyncio.sleep(self.rng.uniform(0.005, 0.04))
            session = self.session
            if session is None or not self.executor.unanswered:
                continue
            result = self.executor.answer()
            fate = self.rng.random()
            if fate >= self.rough / 2:
                session.arrive(result)
            if fate < self.rough:
                self.cut()


class MachineSession:
    """What `Session` is to a link."""

    def __init__(self, machine: Machine, epoch: int) -> None:
        self.epoch = epoch
        self._machine = machine
        self._news: asyncio.Queue[Result | Exception | None] = asyncio.Queue()

    def arrive(self, result: Result) -> None:
        self._news.put_nowait(result)

    def end(self, error: Exception) -> None:
        self._news.put_nowait(error)

    def send(self, plan: Plan) -> None:
        if self._machine.session is self:
            assert plan.epoch == self.epoch
            self._machine.executor.send(plan)

    def leave(self) -> None:
        self._news.put_nowait(None)

    async def serve(self, answered: Callable[[Result], None]) -> None:
        try:
            while (news := await self._news.get()) is not None:
                if isinstance(news, Exception):
                    raise news
                answered(news)
        finally:
            if self._machine.session is self:
                self._machine.session = None


class MachineLink(ExecutorLink):
    def __init__(self, machines: dict[str, Machine], rng: random.Random, address: str, owner: LinkOwner, **options: Any) -> None:
        super().__init__(address, owner, **options)
        self._machine = machines[address]
        self._backoff = Backoff(rng)

    async def _drive_on_channel(self) -> None:
        await asyncio.sleep(0.01)
        machine = self._machine
        if not machine.up:
            raise SessionLost("nobody is there")
        facts = machine.facts
        self._owner.claim(self, facts)
        session = MachineSession(machine, await self._owner.next_epoch(self, facts))
        if not machine.up:
            raise SessionLost("nobody is there any more")
        standing = machine.open(session, self._owner)
        await self._serve(cast(Session, session), facts, standing)
