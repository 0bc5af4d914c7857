"""Leases, what passes with them, and commands between schedulers: one contract for all ledgers."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from sqlalchemy import Connection
from tokenmill_scheduler.core.effects import Transitioned
from tokenmill_scheduler.core.plans import MAX_EPOCH, BlockGroup, ExecutorDescription
from tokenmill_scheduler.core.request import State
from tokenmill_scheduler.ledger import commits, leases, store
from tokenmill_scheduler.ledger.driver_errors import driver_errors
from tokenmill_scheduler.ledger.errors import EpochsUsedUp, ExecutorTaken, LeaseLost, LedgerConflict, LedgerUnavailable
from tokenmill_scheduler.ledger.port import Ledger
from tokenmill_scheduler.ledger.records import Command, Estate, Handover, Lease, Outcome, Verb
from tokenmill_scheduler.ledger.sql import open_ledger
from tokenmill_scheduler.ledger.statements import Statements

from tests.fakes.ledger_records import decode, prefill, run_to_decode, run_to_end, submission, tokens
from tests.simulation.world import description

LONG_S = 3600.0


def test_a_lease_runs_out_by_the_ledgers_clock_and_can_be_renewed(ledger: Ledger) -> None:
    one, other = ledger.take_lease("s1", LONG_S), ledger.take_lease("s2", 0)
    assert one.number < other.number
    assert [(status.lease, status.expired, status.given_up) for status in ledger.leases()] == [
        (one, False, False),
        (other, True, False),
    ]
    ledger.renew_lease(other, LONG_S)
    assert not any(status.expired for status in ledger.leases())
    ledger.give_up_lease(one)
    with pytest.raises(LeaseLost):
        ledger.renew_lease(one, LONG_S)
    assert [(status.expired, status.given_up) for status in ledger.leases()] == [(True, True), (False, False)]


def test_c74_a_scheduler_that_lost_its_lease_writes_nothing(ledger: Ledger) -> None:
    stalled, heir = ledger.take_lease("s1", 0), ledger.take_lease("s2", LONG_S)
    assert ledger.write([submission()], stalled) == [Outcome.WRITTEN], "run out, but nobody has taken over"
    ledger.take_over(heir, [stalled.number])
    with pytest.raises(LeaseLost, match=f"lease {stalled.number} of scheduler s1 no longer holds"):
        ledger.write([prefill()], stalled)
    with pytest.raises(LeaseLost):
        ledger.renew_lease(stalled, LONG_S)
    with pytest.raises(LeaseLost):
        ledger.take_over(stalled, [heir.number])
    with pytest.raises(LeaseLost):
        ledger.claim_executor(stalled, "x0", "here", inherited=False, at_least=0)
    stored = ledger.find("a")
    assert stored is not None
    assert stored.state is State.WAITING
    assert ledger.write([prefill()], heir) == [Outcome.WRITTEN]


def test_requests_belong_to_the_lease_that_wrote_them_until_another_takes_over(ledger: Ledger) -> None:
    ledger.write([submission("orphan", arrival_s=50.0)])
    mine, theirs, third = (ledger.take_lease(name, LONG_S) for name in ("s1", "s2", "s3"))
    ledger.write([submission("mine")], mine)
    ledger.write([submission("theirs"), prefill("theirs"), decode("theirs"), tokens("theirs", 0, 5, 6)], theirs)
    ledger.write([submission("ended"), prefill("ended"), decode("ended")], theirs)
    run_to_end(ledger, "done")
    ledger.write([submission("third")], third)
    stored = ledger.find("theirs")
    assert stored is not None
    assert (stored.lease, stored.scheduler) == (theirs.number, "s2")
    estate = ledger.take_over(mine, [theirs.number, 999])
    assert [(stored.request.request_id, stored.state, output.token_ids) for stored, output in estate.requests] == [
        ("orphan", State.WAITING, ()),
        ("theirs", State.DECODE, (5, 6)),
        ("ended", State.DECODE, ()),
    ]
    assert {(stored.lease, stored.scheduler) for stored, _ in estate.requests} == {(mine.number, "s1")}
    owners = {stored.request.request_id: stored.scheduler for stored, _ in ledger.unfinished()}
    assert owners == {"orphan": "s1", "mine": "s1", "theirs": "s1", "ended": "s1", "third": "s3"}
    assert ledger.take_over(mine, [theirs.number]).requests == (), "once"


def test_a_scheduler_moves_no_others_requests(ledger: Ledger) -> None:
    one, other = ledger.take_lease("s1", LONG_S), ledger.take_lease("s2", LONG_S)
    ledger.write([submission()], one)
    with pytest.raises(LedgerConflict):
        ledger.write([prefill()], other)
    stored = ledger.find("a")
    assert stored is not None
    assert (stored.state, stored.scheduler) == (State.WAITING, "s1")
    ledger.write([prefill()], one)


def test_after_the_highest_epoch_there_is_none(ledger: Ledger) -> None:
    lease = ledger.take_lease("s1", LONG_S)
    assert ledger.claim_executor(lease, "x", "x:1", inherited=False, at_least=MAX_EPOCH) == MAX_EPOCH
    for _ in range(2):
        with pytest.raises(EpochsUsedUp, match="executor x has had the highest epoch there is: give it another --name"):
            ledger.claim_executor(lease, "x", "x:1", inherited=False, at_least=1)


def test_epochs_are_never_given_twice(ledger: Ledger) -> None:
    lease = ledger.take_lease("s1", LONG_S)

    def claim(executor: str, at_least: int) -> int:
        return ledger.claim_executor(lease, executor, "here", inherited=False, at_least=at_least)

    assert [claim("x0", 0), claim("x0", 0), claim("x0", 41), claim("x0", 7), claim("x1", 5)] == [1, 2, 41, 42, 5]


def test_c74_one_scheduler_drives_an_executor(ledger: Ledger) -> None:
    one, other = ledger.take_lease("s1", 0), ledger.take_lease("s2", LONG_S)
    assert ledger.claim_executor(one, "x0", "here", inherited=False, at_least=0) == 1
    for inherited in (False, True):
        with pytest.raises(ExecutorTaken, match="scheduler s1 drives executor x0"):
            ledger.claim_executor(other, "x0", "here", inherited=inherited, at_least=0)
    assert (ledger.has_executor(one, "x0"), ledger.has_executor(other, "x0")) == (True, False)
    assert ledger.take_over(other, [one.number]).executors == (("x0", "here"),)
    assert ledger.has_executor(other, "x0")
    assert ledger.claim_executor(other, "x0", "here", inherited=True, at_least=0) > 1


def test_an_inherited_executor_goes_back_to_a_scheduler_that_was_told_of_it(ledger: Ledger) -> None:
    first, heir = ledger.take_lease("s1", 0), ledger.take_lease("s2", LONG_S)
    ledger.claim_executor(first, "x0", "here", inherited=False, at_least=0)
    ledger.take_over(heir, [first.number])
    back = ledger.take_lease("s1", LONG_S)
    ledger.claim_executor(back, "x0", "here", inherited=False, at_least=0)
    assert not ledger.has_executor(heir, "x0")
    with pytest.raises(ExecutorTaken):
        ledger.claim_executor(heir, "x0", "here", inherited=True, at_least=0)


def test_a_scheduler_come_again_drives_what_it_is_told_to_and_what_it_had_inherited(ledger: Ledger) -> None:
    gone, former = ledger.take_lease("s1", 0), ledger.take_lease("s2", LONG_S)
    ledger.claim_executor(gone, "inherited", "there", inherited=False, at_least=0)
    ledger.claim_executor(former, "told", "here", inherited=False, at_least=0)
    ledger.take_over(former, [gone.number])
    again = ledger.take_lease("s2", LONG_S)
    assert ledger.take_over(again, [former.number]).executors == (("inherited", "there"),)
    assert not ledger.has_executor(again, "told")


def test_a_scheduler_come_again_keeps_the_executors_that_it_is_told_of_again(ledger: Ledger) -> None:
    former, other = ledger.take_lease("s1", 0), ledger.take_lease("s2", LONG_S)
    for executor in ("again", "dropped"):
        ledger.claim_executor(former, executor, f"at {executor}", inherited=False, at_least=0)
    back = ledger.take_lease("s1", LONG_S)
    assert ledger.take_over(back, [former.number], ["at again"]).executors == ()
    assert (ledger.has_executor(back, "again"), ledger.has_executor(back, "dropped")) == (True, False)
    with pytest.raises(ExecutorTaken, match="scheduler s1 drives executor again"):
        ledger.claim_executor(other, "again", "at again", inherited=False, at_least=0)
    assert ledger.claim_executor(other, "dropped", "at dropped", inherited=False, at_least=0) == 2


def test_schedulers_know_what_each_others_executors_can_hold_and_which_are_connected(ledger: Ledger) -> None:
    one, other = ledger.take_lease("s1", LONG_S), ledger.take_lease("s2", LONG_S)
    groups = (BlockGroup(), BlockGroup(sliding_window=8, sinks=2))
    small, large = description("small"), description("large", num_blocks=999, groups=groups)
    for executor in ("large", "new", "small"):
        ledger.claim_executor(one, executor, "here", inherited=False, at_least=0)
    assert ledger.known_executors(other) == (), "nobody has said what they can hold"
    ledger.tell_executors(one, [small, large])
    ledger.tell_executors(other, [description("new")])
    assert [executor.elsewhere for executor in ledger.known_executors(one)] == [False, False], "they are its own"

    def known() -> list[tuple[ExecutorDescription, bool]]:
        return [(executor.description, executor.elsewhere) for executor in ledger.known_executors(other)]

    assert known() == [(large, True), (small, True)]
    ledger.tell_executors(one, [small])
    assert known() == [(large, False), (small, True)]
    ledger.claim_executor(one, "small", "here", inherited=False, at_least=0)
    assert known() == [(large, False), (small, False)], "it is being connected anew"
    ledger.tell_executors(one, [small])
    ledger.take_over(other, [one.number])
    third = ledger.take_lease("s3", LONG_S)
    assert known() == [(large, False), (small, False)]
    ledger.tell_executors(other, [large])
    assert known() == [(large, False), (small, False)]
    assert [executor.elsewhere for executor in ledger.known_executors(third)] == [True, False]


def test_commands_reach_the_scheduler_they_are_for(ledger: Ledger) -> None:
    one, other = ledger.take_lease("s1", LONG_S), ledger.take_lease("s2", LONG_S)
    cancel = Command(one.number, "a", Verb.CANCEL, "not needed")
    update = Command(one.number, "a", Verb.UPDATE, priority=3, deadline_s=7.5)
    elsewhere = Command(other.number, "b", Verb.READ)
    first, second, third = ledger.send([cancel, update, elsewhere])
    assert ledger.received(one) == ((first, cancel), (second, update))
    ledger.settle([first])
    assert ledger.pending([first, second, third]) == {second, third}
    ledger.take_over(other, [one.number])
    assert ledger.pending([first, second, third]) == {third}, "those for a fallen scheduler fall with it"


def test_requests_handed_over_are_those_of_whoever_drives_the_executor(ledger: Ledger) -> None:
    one, other = ledger.take_lease("s1", LONG_S), ledger.take_lease("s2", LONG_S)
    ledger.write([submission("a"), submission("b"), submission("c")], one)
    handover = Handover("x", ("a", "b"), (0, 1))
    assert ledger.write([handover], one) == [Outcome.CONFLICT], "nobody drives it"
    ledger.claim_executor(one, "x", "here", inherited=True, at_least=0)
    assert ledger.write([handover], one) == [Outcome.CONFLICT], "it is one's own"
    ledger.claim_executor(other, "x", "here", inherited=False, at_least=0)
    moves = [prefill("a"), Transitioned("a", State.PREFILL, State.PREEMPTED, 3.0)]
    assert ledger.write([*moves, handover, submission("d")], one) == [Outcome.WRITTEN] * 4
    leases = {request_id: stored.lease for request_id in "abcd" if (stored := ledger.find(request_id))}
    assert leases == {"a": other.number, "b": other.number, "c": one.number, "d": one.number}
    taken = [Command(other.number, "a", Verb.TAKE), Command(other.number, "b", Verb.TAKE, losses=1)]
    assert [command for _, command in ledger.received(other)] == taken
    assert ledger.received(one) == ()
    estate = ledger.take_over(one, [other.number])
    assert [stored.request.request_id for stored, _ in estate.requests] == ["a", "b"]


def test_held_are_those_of_ones_lease_that_have_not_ended(ledger: Ledger) -> None:
    one, other = ledger.take_lease("s1", LONG_S), ledger.take_lease("s2", LONG_S)
    ledger.write([submission("later", arrival_s=2.0), submission("sooner", arrival_s=1.0), submission("not asked for")], one)
    ledger.write([prefill("later"), decode("later"), tokens("later", 0, 5, 6)], one)
    ledger.write([submission("ended"), Transitioned("ended", State.WAITING, State.CANCELLED, 3.0)], one)
    ledger.write([submission("other's")], other)
    held = ledger.held(one, ["later", "ended", "other's", "sooner", "nobody"])
    assert [(stored.request.request_id, output.token_ids) for stored, output in held] == [("sooner", ()), ("later", (5, 6))]
    assert ledger.held(one, []) == ()


def test_progress_tells_what_has_grown_or_ended(ledger: Ledger) -> None:
    for name in ("still", "grown", "long"):
        run_to_decode(ledger, name)
    ledger.write([tokens("still", 0, 5), tokens("grown", 0, 5, 6, 7), tokens("long", 0, *range(100))])
    ledger.write([tokens("long", 100, *range(100, 170))])
    run_to_end(ledger, "ended")
    progress = ledger.progress({"still": 1, "grown": 1, "long": 60, "ended": 3, "nobody": 0})
    assert sorted(progress) == ["ended", "grown", "long"]
    assert (progress["grown"][1].first_index, progress["grown"][1].token_ids) == (1, (6, 7))
    assert progress["long"][1].token_ids == tuple(range(60, 170))
    assert (progress["ended"][0].state, progress["ended"][1].token_ids) == (State.DONE, ())


@pytest.mark.parametrize("hold", [leases.hold, commits.count_up])
def test_a_takeover_waits_for_the_write_under_way_and_a_renewal_does_not(
    postgres_url: str, hold: Callable[[Connection, Lease], object]
) -> None:
    mine, theirs = open_ledger(postgres_url, durable=False), open_ledger(postgres_url, durable=False)
    fallen, heir = theirs.take_lease("s1", 0), mine.take_lease("s2", LONG_S)
    with theirs._engines.write.connect() as connection, connection.begin():
        hold(connection, fallen)
        store.write(connection, Statements(theirs._engines.dialect), [submission()], fallen.number)
        theirs.renew_lease(fallen, 0)
        adopted: list[str] = []
        taking = threading.Thread(target=lambda: adopted.extend(ids_of(mine.take_over(heir, [fallen.number]))))
        taking.start()
    taking.join(30)
    assert adopted == ["a"], "what was written before the takeover is taken over"
    mine.close()
    theirs.close()


def test_c74_a_transaction_that_stands_still_does_not_keep_its_lease(postgres_url: str) -> None:
    mine, theirs = open_ledger(postgres_url), open_ledger(postgres_url, stall_timeout_s=0.1)
    stalled, heir = theirs.take_lease("s1", 0), mine.take_lease("s2", LONG_S)
    with theirs._engines.write.connect() as connection:
        writing = connection.begin()
        commits.count_up(connection, stalled)
        store.write(connection, Statements(theirs._engines.dialect), [submission()], stalled.number)
        assert mine.take_over(heir, [stalled.number]) == Estate()
        with pytest.raises(LedgerUnavailable, match="idle-in-transaction timeout"), driver_errors():
            writing.commit()
    assert mine.find("a") is None
    mine.close()
    theirs.close()


def ids_of(estate: Estate) -> list[str]:
    return [stored.request.request_id for stored, _ in estate.requests]
