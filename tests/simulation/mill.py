"""One to three schedulers on one ledger with executors that change hands, in virtual time; every fault that a seed draws.

While it runs: what a scheduler with a lease drives is its own by the ledger, so that no two drive one request; no two have one
epoch of an executor (`machines.py`); every token that a client reads is the oracle's, once, in order (`clients.py`).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any
from unittest.mock import patch

from tokenmill_scheduler.ledger.errors import LeaseLost, LedgerUnavailable

from tests.fakes.memory_ledger import MemoryLedger
from tests.simulation.clients import Clients
from tests.simulation.machines import Machine, MachineLink
from tests.simulation.node import Node, drives
from tests.simulation.virtual import unix_s

LARGE, SMALL = 1_000, 9


class Mill:
    """`nodes` are the schedulers that live, by name; one that is down starts again at its time in `back_s`.

    `seen_at`: the schedulers that a request was seen to be driven by. `fenced` counts those that found their lease gone.
    """

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.ledger = MemoryLedger(clock=unix_s)
        count = rng.choice([1, 2, 2, 3, 3])
        sizes = [LARGE, *[rng.choice([LARGE, SMALL, SMALL]) for _ in range(rng.randint(0, count))]]
        self.machines = {f"at x{at}": Machine(f"x{at}", blocks, rng) for at, blocks in enumerate(sizes)}
        # Each executor has a scheduler that is told of it, and maybe others that stand by; a scheduler may have none.
        self.told: dict[str, list[str]] = {f"s{at}": [] for at in range(count)}
        for address in self.machines:
            for name in rng.sample(sorted(self.told), k=rng.choice([1, 1, min(2, count)])):
                self.told[name].append(address)
        self.nodes: dict[str, Node] = {}
        self.back_s: dict[str, float] = dict.fromkeys(self.told, 0.0)
        self.clients = Clients(rng, self._pick)
        self.seen_at: dict[str, set[str]] = {}
        self.fenced = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._mending: list[asyncio.TimerHandle] = []

    async def start(self) -> None:
        self._tasks = [asyncio.create_task(work) for work in (self._supervise(), *[m.run() for m in self.machines.values()])]
        await asyncio.sleep(3)

    async def close(self) -> None:
        for watcher in self.clients.watchers:
            await self.clients.end(watcher)
        for task in (*self._tasks, *self.clients.calls):
            task.cancel()
        for task in self._tasks:
            with suppress(asyncio.CancelledError):
                await task
        for node in self.nodes.values():
            await node.crash()

    async def pause(self) -> None:
        await asyncio.sleep(self.rng.choice([0.0, 0.01, 0.1, 0.4]))

    def links(self) -> Any:
        """While it holds, schedulers reach these machines and no others."""
        return patch("tokenmill_scheduler.executors.ExecutorLink", partial(MachineLink, self.machines, self.rng))

    def _pick(self) -> Node | None:
        living = [node for node in self.nodes.values() if not node.loop.failure.done()]
        return self.rng.choice(living) if living else None

    async def _supervise(self) -> None:
        """Starts schedulers that are down when it is time, and those that have found themselves fenced."""
        while True:
            for name, node in list(self.nodes.items()):
                if node.failure is not None and self.nodes.get(name) is node:
                    if not isinstance(node.failure, LeaseLost):
                        raise node.failure
                    self.fenced += 1
                    await self._down(name, 0.2)
            for name in [name for name, back_s in self.back_s.items() if back_s <= unix_s()]:
                node = Node(name, self.told[name], self.ledger, self.rng)
                try:
                    await node.start()
                except LedgerUnavailable:
                    await node.crash()
                    continue
                del self.back_s[name]
                self.nodes[name] = node
            await asyncio.sleep(0.05)

    async def _down(self, name: str, seconds: float, *, between: bool = False) -> None:
        if (node := self.nodes.pop(name, None)) is not None:
            self.back_s[name] = unix_s() + seconds
            await node.crash(between=between)

    # ---- faults ----------------------------------------------------------------------------------------------------------------

    async def crash_node(self) -> None:
        if self.nodes:
            await self._down(self._node(), self.rng.uniform(0, 4), between=self.rng.random() < 0.5)

    async def stop_node(self) -> None:
        if self.nodes:
            name = self._node()
            self.back_s[name] = unix_s() + self.rng.uniform(0, 4)
            with suppress(LedgerUnavailable):
                await self.nodes.pop(name).stop()

    async def stall_node(self) -> None:
        """It reaches the database no more, and goes on; maybe for longer than its lease."""
        if self.nodes:
            node = self.nodes[self._node()]
            node.door.shut = True
            self._mend_later(self.rng.uniform(0.1, 3), node.mend)

    async def lose_database(self) -> None:
        self.ledger.unavailable = True
        self._mend_later(self.rng.uniform(0.1, 2), self._find_database)

    def _find_database(self) -> None:
        self.ledger.unavailable = False

    async def cut_machine(self) -> None:
        self._machine().cut()

    async def crash_machine(self) -> None:
        machine = self._machine()
        if machine.up:
            machine.crash()
            self._mend_later(self.rng.choice([0.1, 0.5, 4]), machine.start)

    def _mend_later(self, seconds: float, mend: Callable[[], None]) -> None:
        self._mending.append(asyncio.get_running_loop().call_later(seconds, mend))

    def _node(self) -> str:
        return self.rng.choice(sorted(self.nodes))

    def _machine(self) -> Machine:
        return self.machines[self.rng.choice(sorted(self.machines))]

    # ---- the end ---------------------------------------------------------------------------------------------------------------

    def stop_faults(self) -> None:
        """What is cut off is connected again. Of what is down some stays so for good: one scheduler and a large executor do not."""
        for timer in self._mending:
            timer.cancel()
        self._find_database()
        for node in self.nodes.values():
            node.mend()
        for machine in self.machines.values():
            machine.rough = 0.0
        for number, machine in enumerate(self.machines.values()):
            if not machine.up and (number == 0 or self.rng.random() < 0.5):
                machine.start()
        for name in sorted(self.back_s)[0 if self.nodes else 1 :]:
            if self.rng.random() < 0.5:
                self.back_s[name] = float("inf")

    async def wait_until_all_have_ended(self, limit_s: float) -> None:
        until_s = unix_s() + limit_s
        await self._wait(self.clients.calls, until_s, "calls without an answer")
        while unfinished := [stored for stored, _ in self.ledger.unfinished()]:
            assert unix_s() < until_s, f"hang: {[(s.request.request_id, s.state, s.scheduler) for s in unfinished]}"
            self.check()
            for task in self._tasks:
                assert not task.done(), f"the world has stopped: {task.exception()}"
            await asyncio.sleep(0.2)
        await self._wait(self.clients.watchers.values(), until_s, "streams without an end")

    async def _wait(self, tasks: Iterable[asyncio.Task[None]], until_s: float, what: str) -> None:
        if tasks := list(tasks):
            done, pending = await asyncio.wait(tasks, timeout=until_s - unix_s())
            assert not pending, f"hang: {len(pending)} {what}"
            for task in done:
                task.result()

    def check(self) -> None:
        """What a scheduler drives that may write is its own: so no other drives it."""
        if self.ledger.unavailable:
            return
        leases = [status.lease for status in self.ledger.leases()]
        for node in self.nodes.values():
            for request_id in drives(node) if node.lease in leases and node.failure is None else ():
                self.seen_at.setdefault(request_id, set()).add(node.name)
                stored = self.ledger.find(request_id)
                assert stored is not None, f"{request_id} is driven and not accepted"
                assert stored.lease == node.lease.number, f"{request_id} is driven by {node.name} and is {stored.scheduler}'s"
