"""The whole service as processes with a proxy in every way between them, and the faults that befall it.

    clients ─ proxy ─ scheduler ─ proxy ─ executors
                          └─ proxy ─ PostgreSQL        (SQLite is a file: no proxy)

On PostgreSQL there are two schedulers, each with proxies of its own and told of one executor; on SQLite one is told of both.

Must not know: what clients do, who judges.
"""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from tokenmill_client import AsyncClient, TokenmillError

from benchmarks.chaos.faults import Action, Fault, Target
from benchmarks.chaos.proxy import Proxy
from benchmarks.chaos.sent import Ask
from benchmarks.chaos.victims import Database, Service, SqliteDatabase, Victim
from tests.fakes.processes import Processes, ServiceProcess

EXECUTORS = 2
# Few sequences and few blocks: requests wait and are preempted also when nothing is broken.
_EXECUTOR_FLAGS = ("--simulated-step-ms", "5", "--num-gpu-blocks-override", "200")
_SCHEDULER_FLAGS = (
    *("--max-num-seqs", "9", "--reattach-grace", "10", "--grace-period", "3"),
    *("--heartbeat-timeout", "2", "--step-timeout", "4", "--lease-time", "3"),
)
_SLOW_S = 0.05
_WATCH_S = 0.1
_IDLE_LIMIT_S = 30.0

T = TypeVar("T")


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
        self._executor_links = [_proxy_of(executor) for executor in self._executors]
        alone = database.dialect == "sqlite"
        self._schedulers = [self._scheduler(number) for number in range(1 if alone else EXECUTORS)]
        self._client_links = [_proxy_of(scheduler) for scheduler in self._schedulers]
        # SQLite is reached by no connection.
        sockets = [] if isinstance(database, SqliteDatabase) else [lambda: database.socket for _ in self._schedulers]
        self._database_links = [Proxy(socket) for socket in sockets]
        self._locks: dict[int, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._watch: asyncio.Task[None] | None = None

    def address(self, number: int = 0) -> str:
        """For client `number`: all schedulers, a different one first for each."""
        links = [*self._client_links, *self._client_links][number % len(self._client_links) :]
        return ",".join(link.address for link in links[: len(self._client_links)])

    @property
    def crashes(self) -> list[str]:
        """Last words of services that ended without being told to."""
        return [crash for service in self._services for crash in service.crashes]

    @property
    def fenced(self) -> int:
        """How often a scheduler ended because another had taken over from it."""
        return sum(service.fenced for service in self._services)

    async def start(self) -> None:
        for link in self._links:
            await link.start()
        await asyncio.gather(*(asyncio.to_thread(service.start) for service in self._services))
        async with AsyncClient(self.address()) as client:
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
                    await self._strike(_one(self._schedulers, fault), fault)
                case Target.EXECUTOR:
                    await self._strike(_one(self._executors, fault), fault)
                case Target.DATABASE:
                    await self._strike(self._database, fault)
                case Target.CLIENT:
                    await self._kill_client(fault, ask)
                case Target.CLIENT_LINK:
                    await self._disturb(_one(self._client_links, fault), fault)
                case Target.EXECUTOR_LINK:
                    await self._disturb(_one(self._executor_links, fault), fault)
                case Target.DATABASE_LINK:
                    await self._disturb(_one(self._database_links, fault), fault)
        finally:
            self.under_way.remove(fault)

    async def trouble_at_idle(self) -> str:
        """What does not come to rest once all requests have ended: blocks, sequences, executors. Empty when all is well."""
        give_up_s = self._clock() + _IDLE_LIMIT_S
        while (trouble := await self._trouble()) and self._clock() < give_up_s:  # noqa: ASYNC110 (a scheduler is asked)
            await asyncio.sleep(_WATCH_S)
        return trouble

    async def _trouble(self) -> str:
        blocks_held: dict[str, int] = {}
        for link in self._client_links:
            async with AsyncClient(link.address) as client:
                try:
                    load = await client.admin.get_load()
                    executors = [executor for executor in await client.admin.list_executors() if executor.connected]
                except TokenmillError as error:
                    return str(error)
            if load.num_requests_running or load.num_requests_waiting:
                return f"{load.num_requests_running} running and {load.num_requests_waiting} waiting, though all have ended"
            for executor in executors:
                blocks_held[executor.name] = executor.total_blocks - executor.free_blocks - executor.cached_blocks
        if len(blocks_held) < EXECUTORS or any(blocks_held.values()):
            return f"of {EXECUTORS} executors these are driven, with so many blocks held: {blocks_held}"
        return ""

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
        client = await asyncio.create_subprocess_exec(
            sys.executable, *_generate(self._client_links[0].address, ask), stdout=PIPE, stderr=DEVNULL
        )
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
        return [*self._executor_links, *self._database_links, *self._client_links]

    @property
    def _services(self) -> list[Service]:
        return [*self._executors, *self._schedulers]

    def _executor(self, number: int) -> Service:
        name = f"executor{number}"
        return Service(name, lambda: self._processes.executor(*_EXECUTOR_FLAGS, name=name))

    def _scheduler(self, number: int) -> Service:
        name = f"scheduler{number}"
        return Service(name, lambda: self._begin_scheduler(number, name))

    def _begin_scheduler(self, number: int, name: str) -> ServiceProcess:
        database = self._database
        flags = (*_SCHEDULER_FLAGS, "--scheduler-name", name)
        if isinstance(database, SqliteDatabase):
            addresses = [link.address for link in self._executor_links]
            return self._processes.scheduler(*addresses, flags=flags, name=name, database=database.url)
        url = database.url_at(self._database_links[number].address)
        return self._processes.scheduler(self._executor_links[number].address, flags=flags, name=name, database=url)

    async def _supervise(self) -> None:
        while True:
            await asyncio.sleep(_WATCH_S)
            for service in self._services:
                # One that a fault has killed is held by the fault until it is back.
                if not (lock := self._locks[id(service)]).locked():
                    async with lock:
                        await asyncio.to_thread(service.revive)


def _proxy_of(service: Service) -> Proxy:
    return Proxy(lambda: service.address.removeprefix("unix:"))


def _one(targets: Sequence[T], fault: Fault) -> T:
    return targets[fault.which % len(targets)]


def _generate(address: str, ask: Ask) -> list[str]:
    prompt = " ".join(map(str, ask.prompt))
    return [
        *("-m", "tokenmill_cli.main", "--server", address),
        *("generate", "--token-ids", prompt, "--request-id", ask.request_id),
        *("--max-tokens", str(ask.max_tokens), "--seed", str(ask.seed)),
    ]
