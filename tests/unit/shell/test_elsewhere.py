"""Two schedulers on one ledger, in one process: requests of the one are read and changed through the other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import pytest
from structlog.testing import capture_logs
from tokenmill_scheduler.core.request import FinishReason, State
from tokenmill_scheduler.desk.errors import IndexAhead, RequestEnded, Unavailable
from tokenmill_scheduler.desk.port import ChunkStream
from tokenmill_scheduler.desk.records import Cancellation, Chunk, Ended
from tokenmill_scheduler.handover import PATIENCE_S
from tokenmill_scheduler.ledger.records import ActionQuery, ActionVerb, Lease
from tokenmill_scheduler.recovery import take_up

from tests.fakes.calls import eventually
from tests.fakes.memory_ledger import MemoryLedger
from tests.fakes.shell import GRACE_S, Shell, output_of, read_all, request, settle


@dataclass
class Pair:
    """`mine` has requests, `other` is asked for them. Both hear each other."""

    ledger: MemoryLedger = field(default_factory=MemoryLedger)
    shells: dict[str, Shell] = field(default_factory=dict)
    leases: dict[str, Lease] = field(default_factory=dict)
    tasks: dict[str, list[asyncio.Task[None]]] = field(default_factory=dict)

    def start(self, name: str, patience_s: float = PATIENCE_S) -> Shell:
        shell = Shell.over(self.ledger, patience_s=patience_s)
        lease = self.ledger.take_lease(name, 3600)
        shell.writer.lease = lease
        shell.desk.open(lease)
        relay = shell.desk.relay
        work = (shell.desk.followers.run(), relay.send(), relay.listen(lease, lambda: True, shell.desk.obey))
        self.shells[name], self.leases[name] = shell, lease
        self.tasks[name] = [asyncio.create_task(one) for one in work]
        return shell

    def kill(self, name: str) -> None:
        for task in self.tasks.pop(name):
            task.cancel()

    def take_over(self, heir: str, fallen: str) -> None:
        estate = self.ledger.take_over(self.leases[heir], [self.leases[fallen].number])
        take_up(self.shells[heir].loop, estate.requests, self.shells[heir].desk.followers.hand_over)


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    pair = Pair()
    pair.start("mine")
    pair.start("other")
    yield pair
    for name in list(pair.tasks):
        pair.kill(name)


@pytest.fixture
async def mine(pair: Pair) -> Shell:
    return pair.shells["mine"]


@pytest.fixture
async def other(pair: Pair) -> Shell:
    return pair.shells["other"]


async def until(holds: Callable[[], bool]) -> None:
    async def it_holds() -> bool:
        return holds()

    await eventually(it_holds)


def state_of(pair: Pair, request_id: str) -> State:
    stored = pair.ledger.find(request_id)
    assert stored is not None
    return stored.state


def is_read_elsewhere(shell: Shell) -> bool:
    live = shell.loop.live.get("a")
    assert live is not None
    return live.read_elsewhere


async def test_a_stream_of_anothers_request_has_every_token_and_the_end(mine: Shell, other: Shell) -> None:
    await mine.join()
    await mine.submit(request("a", max_tokens=9))
    for _ in range(3):
        await mine.step()
    reading = [asyncio.create_task(read_all(await other.desk.attach("a", index))) for index in (0, 1)]
    with pytest.raises(IndexAhead):
        await other.desk.attach("a", 100)
    await mine.run_out()
    for tokens, ended in await asyncio.gather(*reading):
        assert tokens == output_of(request("a", max_tokens=9))
        assert ended == Ended(State.DONE, FinishReason.LENGTH, 9)


async def test_a_reader_that_has_seen_more_elsewhere_than_is_followed_here(pair: Pair, mine: Shell, other: Shell) -> None:
    await mine.join()
    await mine.submit(request("a", max_tokens=9))
    pair.kill("other")
    await other.desk.attach("a", 0)
    for _ in range(3):
        await mine.step()
    attachment = await other.desk.attach("a", 2)
    assert attachment.earlier == output_of(request("a", max_tokens=9))[:2]


async def test_a_request_followed_here_goes_on_here_when_it_is_taken_over(pair: Pair, mine: Shell, other: Shell) -> None:
    await mine.join()
    await mine.submit(request("a", max_tokens=9, detached=False))
    await mine.desk.attach("a", 0)
    for _ in range(3):
        await mine.step()
    attachment = await other.desk.attach("a", 0)
    first = await anext(attachment.chunks)
    assert isinstance(first, Chunk)
    pair.kill("mine")
    pair.take_over("other", "mine")
    assert other.loop.live.get("a") is not None
    other.clock.now_s += GRACE_S + 1
    await other.join(epoch=2)
    assert (await other.states_after_tick("a"))[0] is not State.CANCELLED, "it has a reader"
    reading = asyncio.create_task(read_rest(attachment.chunks, first.token_ids))
    await other.run_out()
    assert await reading == output_of(request("a", max_tokens=9))


async def test_the_log_says_which_executor_a_request_ran_on_that_is_taken_over(pair: Pair, mine: Shell, other: Shell) -> None:
    await mine.join()
    await mine.submit(request("a", max_tokens=9))
    await mine.step()
    pair.kill("mine")
    with capture_logs() as logs:
        pair.take_over("other", "mine")
    preempted = [entry for entry in logs if entry["event"] == "request preempted"]
    assert [(entry["request_id"], entry["executor"]) for entry in preempted] == [("a", "played")]


async def read_rest(chunks: ChunkStream, tokens: tuple[int, ...]) -> tuple[int, ...]:
    async for item in chunks:
        if isinstance(item, Chunk):
            assert item.first_index == len(tokens)
            tokens += item.token_ids
    return tokens


async def test_c12_a_cancel_through_another_scheduler_ends_the_stream(mine: Shell, other: Shell) -> None:
    await mine.submit(request("a"))
    reading = asyncio.create_task(read_all(await mine.desk.attach("a", 0)))
    assert await other.desk.cancel("a", "not needed") == Cancellation(State.CANCELLED, already_ended=False)
    assert (await reading)[1].state is State.CANCELLED
    assert (await other.desk.transitions("a"))[-1].reason == "not needed"
    assert await other.desk.cancel("a", "") == Cancellation(State.CANCELLED, already_ended=True)


async def test_an_update_through_another_scheduler(mine: Shell, other: Shell) -> None:
    await mine.submit(request("a"))
    changed = await other.desk.update("a", 7, 5_000.0)
    assert (changed.stored.request.priority, changed.stored.request.deadline_s) == (7, 5_000.0)
    assert changed.wait_reason == "scheduler mine has it"
    live = mine.loop.live.get("a")
    assert live is not None
    assert live.request.priority == 7
    await mine.desk.cancel("a", "")
    with pytest.raises(RequestEnded):
        await other.desk.update("a", 8, None)


@pytest.mark.parametrize("n", [1, 2])
async def test_of_updates_at_once_through_another_scheduler_each_is_recorded_once(
    pair: Pair, mine: Shell, other: Shell, n: int
) -> None:
    await mine.submit(request("a", n=n, best_of=n))
    await asyncio.gather(*[other.desk.update("a", to, None, "", actor) for actor, to in {"ann": 7, "bob": 5}.items()])
    assert [action.actor for action in pair.ledger.actions(ActionQuery()).actions] == ["bob", "ann"]
    assert [stored.request.priority for name in ("a", "a/1")[:n] if (stored := pair.ledger.find(name))] == [5] * n


async def test_a_scheduler_that_neither_answers_nor_falls_is_unavailable(
    pair: Pair, mine: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenmill_scheduler.lookup.TAKEOVER_S", 0.05)
    hasty = pair.start("hasty", patience_s=0.0)
    await mine.submit(request("a"))
    pair.kill("mine")
    with pytest.raises(Unavailable, match="does not answer"):
        await hasty.desk.cancel("a", "")
    await until(lambda: not pair.ledger.received(pair.leases["mine"]))
    assert (await hasty.desk.status("a")).stored.state is State.WAITING, "withdrawn"


async def test_changes_of_a_request_whose_scheduler_has_fallen_wait_for_its_heir(pair: Pair, mine: Shell, other: Shell) -> None:
    """Each is carried out and recorded once, through the heir and through a third one."""
    third = pair.start("third")
    for name in ("a", "b"):
        await mine.submit(request(name))
    pair.kill("mine")
    updating = asyncio.create_task(third.desk.update("a", 5, None, "urgent", "op"))
    cancelling = asyncio.create_task(other.desk.cancel("b", "not needed", "op"))
    await until(lambda: len(pair.ledger.received(pair.leases["mine"])) == 2)
    pair.take_over("other", "mine")
    assert (await updating).stored.request.priority == 5
    assert await cancelling == Cancellation(State.CANCELLED, already_ended=False)
    actions = pair.ledger.actions(ActionQuery()).actions
    assert sorted((action.verb, action.target) for action in actions) == [(ActionVerb.CANCEL, "b"), (ActionVerb.UPDATE, "a")]


async def test_a_change_that_waits_for_a_takeover_is_given_up_when_its_scheduler_stops(
    pair: Pair, mine: Shell, other: Shell
) -> None:
    await mine.submit(request("a"))
    pair.kill("mine")
    cancelling = asyncio.create_task(other.desk.cancel("a", ""))
    await until(lambda: bool(pair.ledger.received(pair.leases["mine"])))
    # It is other's by the ledger, which has not heard of it.
    pair.ledger.take_over(pair.leases["other"], [pair.leases["mine"].number])
    await asyncio.sleep(0.2)
    assert not cancelling.done()
    other.desk.close()
    with pytest.raises(Unavailable, match="shutting down"):
        await cancelling


async def test_an_outage_delays_commands_and_streams(pair: Pair, mine: Shell, other: Shell) -> None:
    await mine.submit(request("a"))
    reading = asyncio.create_task(read_all(await other.desk.attach("a", 0)))
    cancelling = asyncio.create_task(other.desk.cancel("a", ""))
    # Looked up, and asked for; before that the outage would refuse the call.
    await until(lambda: bool(pair.ledger._leases.commands) or state_of(pair, "a") is State.CANCELLED)
    pair.ledger.unavailable = True
    await asyncio.sleep(0.1)
    pair.ledger.unavailable = False
    assert (await cancelling).state is State.CANCELLED
    assert (await reading)[1].state is State.CANCELLED


async def test_c13_the_last_reader_elsewhere_takes_a_request_along(pair: Pair, mine: Shell, other: Shell) -> None:
    await mine.submit(request("a", detached=False))
    one, away = await mine.desk.attach("a", 0), await other.desk.attach("a", 0)
    await until(lambda: is_read_elsewhere(mine))
    await one.chunks.aclose()
    await settle()
    assert (await mine.desk.status("a")).stored.state is State.WAITING
    await away.chunks.aclose()
    await until(lambda: state_of(pair, "a") is State.CANCELLED)


async def test_a_reader_elsewhere_that_is_heard_of_no_more_counts_for_the_grace(pair: Pair, mine: Shell, other: Shell) -> None:
    await mine.join()
    await mine.submit(request("a", max_tokens=1_000, detached=False))
    await other.desk.attach("a", 0)
    await until(lambda: is_read_elsewhere(mine))
    pair.kill("other")
    mine.clock.now_s += GRACE_S + 1
    assert await mine.states_after_tick("a") == [State.CANCELLED]


async def test_at_shutdown_streams_of_others_requests_say_attach_again(mine: Shell, other: Shell) -> None:
    await mine.submit(request("a", detached=False))
    away = await other.desk.attach("a", 0)
    other.desk.close()
    other.desk.close_streams(Unavailable("attach again", 1.0))
    with pytest.raises(Unavailable, match="attach again"):
        await anext(away.chunks)
    await away.chunks.aclose()
    assert (await mine.desk.status("a")).stored.state is State.WAITING


async def test_what_an_operator_did_elsewhere_is_recorded_though_its_caller_has_gone(pair: Pair, mine: Shell, other: Shell) -> None:
    await mine.join()
    await mine.submit(request("a", max_tokens=9))
    asking = asyncio.create_task(other.desk.cancel("a", "not needed", actor="ann"))
    sent = pair.leases["mine"]
    await until(lambda: bool(pair.ledger.received(sent)) or state_of(pair, "a") is State.CANCELLED)
    pair.kill("other")
    asking.cancel()
    await until(lambda: state_of(pair, "a") is State.CANCELLED)
    recorded = pair.ledger.actions(ActionQuery()).actions
    assert [(action.actor, action.verb, action.target, action.reason) for action in recorded] == [
        ("ann", ActionVerb.CANCEL, "a", "not needed")
    ]


async def test_choices_of_a_request_are_read_changed_and_taken_over_elsewhere_as_one(pair: Pair, mine: Shell, other: Shell) -> None:
    group = request("a", max_tokens=9, n=2, best_of=2)
    await mine.join()
    await mine.submit(group)
    await mine.submit(request("b", n=3, best_of=3))
    for _ in range(3):
        await mine.step()
    reading = [asyncio.create_task(read_all(one)) for one in await other.desk.attach_all({"a": 0, "a/1": 0})]
    await other.desk.update("b", 5, None)
    assert [stored.request.priority for name in ("b", "b/1", "b/2") if (stored := pair.ledger.find(name))] == [5, 5, 5]
    assert await other.desk.cancel("b/2", "") == Cancellation(State.CANCELLED, already_ended=False)
    assert await other.desk.cancel("b", "") == Cancellation(State.CANCELLED, already_ended=False)
    assert [state_of(pair, name) for name in ("b", "b/1", "b/2")] == [State.CANCELLED] * 3
    await mine.run_out()
    for tokens, ended in await asyncio.gather(*reading):
        assert (tokens, ended.state) == (output_of(group), State.DONE)


async def test_choices_that_wait_are_one_group_again_at_the_scheduler_that_takes_them_over(pair: Pair, other: Shell) -> None:
    group = request("a", n=3, best_of=3)
    await pair.shells["mine"].submit(group)
    pair.kill("mine")
    pair.take_over("other", "mine")
    await other.join(epoch=2)
    await other.run_out()
    assert [state_of(pair, name) for name in ("a", "a/1", "a/2")] == [State.DONE] * 3
    admitted = [
        sum(admission.sequence_id in plan.advance_sequence_ids for admission in plan.admit) for plan in other.executor.plans
    ]
    assert admitted[0] == 3, "its prompt is within one block, so none waits for another"
