"""The lease keeper, step by step, over the ledger in memory and one clock for all."""

from __future__ import annotations

import pytest
from tokenmill_scheduler.lease import LeaseKeeper, take_lease
from tokenmill_scheduler.ledger.errors import LeaseLost
from tokenmill_scheduler.ledger.records import Estate, Lease

from tests.fakes.ledger_records import submission
from tests.fakes.memory_ledger import MemoryLedger

LEASE_S = 12.0


class Fleet:
    """Schedulers on one ledger. Those in `running` look at the leases once a second of `pass_s`."""

    def __init__(self) -> None:
        self.now_s = 1_000.0
        self.ledger = MemoryLedger(clock=lambda: self.now_s)
        self.leases: dict[str, Lease] = {}
        self.keepers: dict[str, LeaseKeeper] = {}
        self.hung: set[str] = set()
        self.running: set[str] = set()
        self.estates: list[tuple[str, list[str]]] = []

    def start(self, name: str, *, alone: bool = False) -> Estate:
        lease, estate = take_lease(self.ledger, name, LEASE_S, alone=alone)
        self.leases[name] = lease
        self.keepers[name] = LeaseKeeper(self.ledger, lease, LEASE_S, lambda: name not in self.hung, lambda: self.now_s)
        self.running.add(name)
        return estate

    def submit(self, name: str, request_id: str) -> None:
        self.ledger.write([submission(request_id)], self.leases[name])

    def pass_s(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now_s += 1.0
            for name in sorted(self.running):
                if (estate := self.keepers[name].step()) is not None:
                    self.estates.append((name, ids_of(estate)))

    @property
    def alive(self) -> list[str]:
        return [status.lease.scheduler for status in self.ledger.leases()]


def ids_of(estate: Estate) -> list[str]:
    return [stored.request.request_id for stored, _ in estate.requests]


@pytest.fixture
def fleet() -> Fleet:
    fleet = Fleet()
    fleet.start("s1")
    fleet.start("s2")
    fleet.submit("s1", "a")
    return fleet


def test_leases_that_are_kept_stay(fleet: Fleet) -> None:
    fleet.pass_s(100)
    assert fleet.alive == ["s1", "s2"]
    assert fleet.estates == []
    assert fleet.keepers["s1"].peers == (fleet.leases["s2"],)


def test_a_fallen_scheduler_is_taken_over_when_its_lease_has_run_out(fleet: Fleet) -> None:
    fleet.pass_s(20)
    fleet.running.remove("s1")
    # Its last renewal was up to a third of the lease before.
    fleet.pass_s(int(LEASE_S * 2 / 3) - 1)
    assert fleet.estates == []
    fleet.pass_s(int(LEASE_S / 3) + 1)
    assert fleet.estates == [("s2", ["a"])]
    assert fleet.alive == ["s2"]
    with pytest.raises(LeaseLost, match="of scheduler s1 no longer holds"):
        fleet.keepers["s1"].step()


def test_one_of_several_takes_over(fleet: Fleet) -> None:
    fleet.start("s3")
    fleet.running.remove("s1")
    fleet.pass_s(30)
    assert fleet.estates == [("s2", ["a"])]
    assert fleet.alive == ["s2", "s3"]


def test_a_scheduler_whose_loop_hangs_does_not_renew_and_takes_over_nothing(fleet: Fleet) -> None:
    fleet.hung.add("s1")
    with pytest.raises(LeaseLost):
        fleet.pass_s(30)
    assert fleet.estates == [("s2", ["a"])]


def test_a_lone_scheduler_that_stood_still_goes_on(fleet: Fleet) -> None:
    fleet.running.remove("s2")
    fleet.pass_s(30)
    fleet.now_s += 1_000
    fleet.submit("s1", "b")
    fleet.pass_s(30)
    assert fleet.alive == ["s1"]


def test_after_an_outage_nobody_is_taken_over_who_comes_back_a_little_later(fleet: Fleet) -> None:
    fleet.pass_s(20)
    fleet.ledger.unavailable = True
    fleet.pass_s(30)
    fleet.ledger.unavailable = False
    fleet.running.remove("s1")
    fleet.pass_s(int(LEASE_S) - 2)
    fleet.running.add("s1")
    fleet.pass_s(20)
    assert fleet.estates == []
    assert fleet.alive == ["s1", "s2"]


def test_whoever_has_stood_still_takes_over_nothing_before_it_has_watched(fleet: Fleet) -> None:
    fleet.pass_s(20)
    fleet.now_s += 100
    assert fleet.keepers["s2"].step() is None
    fleet.pass_s(20)
    assert fleet.alive == ["s1", "s2"]


def test_what_was_given_up_is_taken_over_at_once(fleet: Fleet) -> None:
    fleet.running.remove("s1")
    fleet.ledger.give_up_lease(fleet.leases["s1"])
    fleet.pass_s(1)
    assert fleet.estates == [("s2", ["a"])]


def test_a_scheduler_started_again_has_what_it_had_and_its_former_self_nothing(fleet: Fleet) -> None:
    fleet.submit("s2", "b")
    assert ids_of(fleet.start("s1")) == ["a"]
    with pytest.raises(LeaseLost):
        fleet.ledger.write([submission("c")], Lease(1, "s1"))
    fleet.pass_s(30)
    assert fleet.alive == ["s2", "s1"]


def test_a_scheduler_that_is_alone_has_all_there_is(fleet: Fleet) -> None:
    fleet.submit("s2", "b")
    assert sorted(ids_of(fleet.start("s3", alone=True))) == ["a", "b"]
    assert fleet.alive == ["s3"]


def test_one_that_starts_leaves_the_living_alone(fleet: Fleet) -> None:
    assert fleet.start("s3") == Estate()
    assert fleet.alive == ["s1", "s2", "s3"]
