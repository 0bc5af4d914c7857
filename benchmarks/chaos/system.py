"""The whole service as processes with a proxy in every way between them, and the faults that befall it.

    clients ─ proxy ─ scheduler ─ proxy ─ executors
                          └─ proxy ─ PostgreSQL        (SQLite is a file: no proxy)

Must not know: what clients do, who judges.
"""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from tokenmill_client import AsyncClient, TokenmillError

from benchmarks.chaos.faults import Action, Fault, Target
from benchmarks.chaos.proxy import Proxy
from benchmarks.chaos.sent import Ask
from benchmarks.chaos.victims import Database, PostgresDatabase, Service, Victim
from tests.fakes.processes import Processes, ServiceProcess

EXECUTORS = 2
# Few sequences and few blocks: requests wait and are preempted also when nothing is broken.
_EXECUTOR_FLAGS = ("--simulated-step-ms", "5", "--num-gpu-blocks-override", "200")
_SCHEDULER_FLAGS = (
    *("--max-num-seqs", "9", "--reattach-grace", "10", "--grace-period", "3"),
    *("--heartbeat-timeout", "2", "--step-timeout", "4"),
)
_SLOW_S = 0.05
_WATCH_S = 0.1
_IDLE_LIMIT_S = 30.0


@dataclass(frozen=True, slots=True)
class Befell:
    """A fault that was carried out, by the clock of the run: from `from_s` until `healed_s`, when the victim served again."""

    fault: Fault
    from_s: float
    healed_s: float


class System:
    def __init__(self, processes: Processes, database: Database, clock: Callable[[], float]) -> None:
        self.befell: list[Befell] = []
        self.under_way: list[Fault] = []
        self._processes = processes
        self._database = database
        self._clock = clock
        self._executors = [self._executor(number) for number in range(EXECUTORS)]
        self._scheduler = Service("scheduler", self._begin_scheduler)
        self._executor_links = [Proxy(lambda executor=executor: _path(executor.address)) for executor in self._executors]  # type: ignore[misc]
        self._client_link = Proxy(lambda: _path(self._scheduler.address))
        self._database_link = Proxy(lambda: database.socket) if isinstance(database, PostgresDatabase) else None
        self._locks: dict[int, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._watch: asyncio.Task[None] | None = None

    @property
    def address(self) -> str:
        """For clients."""
        return self._client_link.address

    @property
    def crashes(self) -> list[str]:
        """Last words of services that ended without being told to."""
        return [crash for service in (self._scheduler, *self._executors) for crash in service.crashes]

    async def start(self) -> None:
        for link in self._links:
            await link.start()
        for service in (*self._executors, self._scheduler):
            await asyncio.to_thread(service.start)
        async with AsyncClient(self.address) as client:
            await client.wait_ready()
        self._watch = asyncio.create_task(self._supervise())

    async def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        for link in self._links:
            await link.close()

    async def befall(self, fault: Fault, ask: Ask) -> None:
        """Carries the fault out, and heals it. A victim suffers one at a time. `ask` is what a client that is killed asks for."""
        self.under_way.append(fault)
        try:
            match fault.target:
                case Target.SCHEDULER:
                    await self._strike(self._scheduler, fault)
                case Target.EXECUTOR:
                    await self._strike(self._executors[fault.which % EXECUTORS], fault)
                case Target.DATABASE:
                    await self._strike(self._database, fault)
                case Target.CLIENT:
                    await self._kill_client(fault, ask)
                case Target.CLIENT_LINK:
                    await self._disturb(self._client_link, fault)
                case Target.EXECUTOR_LINK:
                    await self._disturb(self._executor_links[fault.which % EXECUTORS], fault)
                case Target.DATABASE_LINK:
                    assert self._database_link is not None
                    await self._disturb(self._database_link, fault)
        finally:
            self.under_way.remove(fault)

    async def trouble_at_idle(self) -> str:
        """What does not come to rest once all requests have ended: blocks, sequences, executors. Empty when all is well."""
        give_up_s = self._clock() + _IDLE_LIMIT_S
        trouble = "nothing was asked"
        async with AsyncClient(self.address) as client:
            while trouble and self._clock() < give_up_s:
                try:
                    trouble = await _trouble(client)
                except TokenmillError as error:
                    trouble = str(error)
                await asyncio.sleep(_WATCH_S if trouble else 0.0)
        return trouble

    # ---- faults ----------------------------------------------------------------------------------------------------------------

    async def _strike(self, victim: Victim, fault: Fault) -> None:
        async with self._locks[id(victim)]:
            from_s = self._clock()
            if fault.action in (Action.KILLED, Action.TOLD_TO_END):
                await asyncio.to_thread(victim.kill if fault.action is Action.KILLED else victim.end)
                await asyncio.sleep(fault.lasts_s)
                await asyncio.to_thread(victim.start)
            else:
                await asyncio.to_thread(victim.stop)
                await asyncio.sleep(fault.lasts_s)
                await asyncio.to_thread(victim.go_on)
            self.befell.append(Befell(fault, from_s, self._clock()))

    async def _disturb(self, link: Proxy, fault: Fault) -> None:
        async with self._locks[id(link)]:
            from_s = self._clock()
            if fault.action is Action.RESET:
                link.reset()
            elif fault.action is Action.CUT_OFF:
                link.hold()
                await asyncio.sleep(fault.lasts_s)
                # Half of the cuts heal, the other half break.
                if fault.which % 4 < 2:
                    link.reset()
                link.release()
            else:
                link.delay_s = _SLOW_S
                await asyncio.sleep(fault.lasts_s)
                link.delay_s = 0.0
            self.befell.append(Befell(fault, from_s, self._clock()))

    async def _kill_client(self, fault: Fault, ask: Ask) -> None:
        """A client of its own, as a user starts one, dies while it reads; the others are not to notice."""
        from_s = self._clock()
        client = await asyncio.create_subprocess_exec(sys.executable, *_generate(self.address, ask), stdout=PIPE, stderr=DEVNULL)
        try:
            assert client.stdout is not None
            # Its first words, or its end while nobody answers.
            await client.stdout.read(1)
            await asyncio.sleep(fault.lasts_s)
        finally:
            with suppress(ProcessLookupError):
                client.kill()
            await client.communicate()
        self.befell.append(Befell(fault, from_s, self._clock()))

    # ---- processes -------------------------------------------------------------------------------------------------------------

    @property
    def _links(self) -> list[Proxy]:
        database_links = [] if self._database_link is None else [self._database_link]
        return [*self._executor_links, *database_links, self._client_link]

    def _executor(self, number: int) -> Service:
        name = f"executor{number}"
        return Service(name, lambda: self._processes.executor(*_EXECUTOR_FLAGS, name=name))

    def _begin_scheduler(self) -> ServiceProcess:
        addresses = [link.address for link in self._executor_links]
        url = self._database.url
        if isinstance(self._database, PostgresDatabase):
            assert self._database_link is not None
            url = self._database.url_at(self._database_link.address)
        return self._processes.scheduler(*addresses, flags=(*_SCHEDULER_FLAGS, "--database", url))

    async def _supervise(self) -> None:
        while True:
            await asyncio.sleep(_WATCH_S)
            for service in (self._scheduler, *self._executors):
                # One that a fault has killed is held by the fault until it is back.
                if not (lock := self._locks[id(service)]).locked():
                    async with lock:
                        await asyncio.to_thread(service.revive)


def _path(address: str) -> str:
    return address.removeprefix("unix:")


def _generate(address: str, ask: Ask) -> list[str]:
    prompt = " ".join(map(str, ask.prompt))
    return [
        *("-m", "tokenmill_cli.main", "--server", address),
        *("generate", "--token-ids", prompt, "--request-id", ask.request_id),
        *("--max-tokens", str(ask.max_tokens), "--seed", str(ask.seed)),
    ]


async def _trouble(client: AsyncClient) -> str:
    load = await client.admin.get_load()
    if load.num_requests_running or load.num_requests_waiting:
        return f"{load.num_requests_running} running and {load.num_requests_waiting} waiting, all have ended"
    for executor in await client.admin.list_executors():
        if not executor.connected:
            return f"{executor.name} is not connected"
        if executor.held_blocks or executor.free_blocks + executor.cached_blocks != executor.total_blocks:
            return (
                f"{executor.name}: {executor.free_blocks} free, {executor.held_blocks} held, {executor.cached_blocks} cached blocks"
            )
    return ""
