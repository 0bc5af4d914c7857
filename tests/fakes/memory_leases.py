"""The part of the in-memory ledger that several schedulers share beside requests: leases, executors, commands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tokenmill_scheduler.core.events import KnownExecutor
from tokenmill_scheduler.core.plans import MAX_EPOCH, ExecutorDescription
from tokenmill_scheduler.ledger.errors import EpochsUsedUp, ExecutorTaken, LeaseLost
from tokenmill_scheduler.ledger.records import Command, Lease


@dataclass(frozen=True, slots=True)
class Driven:
    """An executor and who drives it."""

    epoch: int
    address: str
    lease: int | None
    inherited: bool
    connected: bool = False
    description: ExecutorDescription | None = None


@dataclass
class MemoryLeases:
    """`expires_s` is keyed by lease number; None: given up."""

    names: dict[int, str] = field(default_factory=dict)
    expires_s: dict[int, float | None] = field(default_factory=dict)
    executors: dict[str, Driven] = field(default_factory=dict)
    commands: dict[int, Command] = field(default_factory=dict)
    _last_number: int = 0

    def number(self) -> int:
        self._last_number += 1
        return self._last_number

    def hold(self, lease: Lease) -> None:
        if self.names.get(lease.number) != lease.scheduler:
            raise LeaseLost(f"lease {lease.number} of scheduler {lease.scheduler} no longer holds")

    def end(self, lease: Lease, fallen: Sequence[int], told: Sequence[str]) -> list[int]:
        """The leases that ended; their commands are gone, and what was to be left free of their executors is."""
        self.hold(lease)
        ended = [number for number in fallen if number in self.names and number != lease.number]
        former = [number for number in ended if self.names[number] == lease.scheduler]
        for number in ended:
            del self.names[number], self.expires_s[number]
        self.commands = {number: command for number, command in self.commands.items() if command.lease not in ended}
        for name, driven in self.executors.items():
            if driven.lease in former and not driven.inherited:
                kept = lease.number if driven.address in told else None
                self.executors[name] = replace(driven, lease=kept, connected=False)
        return ended

    def inherit(self, lease: Lease, ended: Sequence[int]) -> tuple[tuple[str, str], ...]:
        inherited = sorted(name for name, driven in self.executors.items() if driven.lease in ended)
        for name in inherited:
            self.executors[name] = replace(self.executors[name], lease=lease.number, inherited=True, connected=False)
        return tuple((name, self.executors[name].address) for name in inherited)

    def tell(self, lease: Lease, connected: Sequence[ExecutorDescription]) -> None:
        descriptions = {description.name: description for description in connected}
        for name, driven in self.executors.items():
            if driven.lease == lease.number:
                description = descriptions.get(name, driven.description)
                self.executors[name] = replace(driven, connected=name in descriptions, description=description)

    def known(self, lease: Lease) -> tuple[KnownExecutor, ...]:
        executors = [driven for _, driven in sorted(self.executors.items()) if driven.lease in self.names]
        known = [(driven.description, driven.connected and driven.lease != lease.number) for driven in executors]
        return tuple(KnownExecutor(description, elsewhere) for description, elsewhere in known if description is not None)

    def driver(self, executor: str) -> Lease | None:
        driven = self.executors.get(executor)
        number = None if driven is None else driven.lease
        return None if number is None or number not in self.names else Lease(number, self.names[number])

    def claim(self, lease: Lease, executor: str, address: str, inherited: bool, at_least: int) -> int:
        self.hold(lease)
        driven = self.executors.get(executor, Driven(0, "", None, inherited=False))
        if driven.lease in self.names and driven.lease != lease.number and (inherited or not driven.inherited):
            assert driven.lease is not None
            raise ExecutorTaken(f"scheduler {self.names[driven.lease]} drives executor {executor}")
        if driven.epoch == MAX_EPOCH:
            raise EpochsUsedUp(executor)
        epoch = max(driven.epoch + 1, at_least)
        self.executors[executor] = Driven(epoch, address, lease.number, inherited, description=driven.description)
        return epoch
