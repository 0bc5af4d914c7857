"""Two schedulers on one ledger, in one process: an executor changes hands, and what only it can run goes with it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from tokenmill_scheduler.core.choices import further_choices
from tokenmill_scheduler.core.effects import Transitioned
from tokenmill_scheduler.core.events import ExecutorsAwaited, KnownExecutor, Tick
from tokenmill_scheduler.core.request import FinishReason, State
from tokenmill_scheduler.core.waiting import WaitCode
from tokenmill_scheduler.desk.errors import Unavailable
from tokenmill_scheduler.desk.records import Cancellation, Chunk, Ended
from tokenmill_scheduler.handover import PATIENCE_S
from tokenmill_scheduler.ledger.records import Handover, Lease, Submission
from tokenmill_scheduler.recovery import take_up

from tests.fakes.calls import eventually
from tests.fakes.memory_ledger import MemoryLedger
from tests.fakes.shell import PlayedExecutor, Shell, output_of, read_all, request, settle


def start(ledger: MemoryLedger, name: str) -> tuple[Shell, Lease]:
    shell, lease = Shell.over(ledger), ledger.take_lease(name, 3600)
    shell.writer.lease = lease
    shell.desk.open(lease)
    return shell, lease


class SlowLedger(MemoryLedger):
    """Executors are known as of when it is asked, and told when it `may_answer`."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.may_answer = threading.Event(), threading.Event()

    def known_executors(self, lease: Lease) -> tuple[KnownExecutor, ...]:
        known = super().known_executors(lease)
        self.asked.set()
        assert self.may_answer.wait(10)
        return known


class SlowRead:
    """`read_ledger`, whose first answer is told when it `may_answer`, as the ledger was when it was asked."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self._asked = 0

    async def __call__(self, read: Callable[..., Any], *arguments: object) -> Any:
        answer = read(*arguments)
        self._asked += 1
        if self._asked == 1:
            await self.may_answer.wait()
        return answer


async def obey(shell: Shell, lease: Lease) -> None:
    """As `Relay.listen` does."""
    received = shell.ledger.received(lease)
    await shell.desk.obey([command for _, command in received])
    shell.ledger.settle([number for number, _ in received])
    await settle()


async def lose(shell: Shell) -> None:
    """To another scheduler, in mid-step."""
    shell.executor.unanswered.clear()
    shell.loop.lost(shell.loop.drives["played"], "another scheduler took it", lives=True)
    await settle()


async def is_live(shell: Shell, request_id: str) -> bool:
    return shell.loop.live.runs(request_id)


def gone(shell: Shell) -> None:
    """It is found that another scheduler drives the executor."""
    shell.desk.handovers.executor_gone(shell.executor.facts.description)


async def drives(shell: Shell, lease: Lease, epoch: int = 1) -> None:
    """The executor is claimed, joins, and the other schedulers are told."""
    shell.ledger.claim_executor(lease, "played", "here", inherited=False, at_least=epoch)
    await shell.join(epoch)
    await shell.desk.handovers.look()


async def test_what_only_an_executor_given_away_can_run_goes_on_at_its_new_driver() -> None:
    ledger = MemoryLedger()
    (mine, _), (other, lease) = start(ledger, "mine"), start(ledger, "other")
    await mine.join()
    await mine.submit(request("a", max_tokens=6, detached=False))
    await mine.submit(request("b", max_tokens=6, n=2, best_of=2))
    reading = await mine.desk.attach("a", 0)
    for _ in range(3):
        await mine.step()
    await lose(mine)
    ledger.claim_executor(lease, "played", "here", inherited=False, at_least=0)
    gone(mine)
    await settle()
    assert len(mine.loop.live) == len(mine.loop.live.attended) == 0
    assert mine.desk.load().num_requests_waiting == sum(lane.waiting for lane in mine.desk.load().lanes) == 0
    assert mine.desk.executors() == ()
    with pytest.raises(Unavailable, match="another scheduler has this request now"):
        [item async for item in reading.chunks]
    await reading.chunks.aclose()
    await other.join(epoch=2)
    await obey(other, lease)
    await obey(other, lease)
    attachments = [await other.desk.attach(name, 1) for name in ("a", "b", "b/1")]
    outputs = [asyncio.create_task(read_all(attachment)) for attachment in attachments]
    await other.run_out()
    for output in outputs:
        tokens, ended = await output
        assert len(tokens) == 6
        assert ended == Ended(State.DONE, FinishReason.LENGTH, 6)
    assert ledger.output("a").token_ids == output_of(request("a", max_tokens=6))
    moves = [move.after for move in ledger.transitions("a")]
    assert moves == [State.WAITING, State.PREFILL, State.DECODE, State.PREEMPTED, State.PREFILL, State.DECODE, State.DONE]


async def test_where_nobody_drives_the_executor_any_more_its_requests_stay_and_go_on() -> None:
    mine, _ = start(MemoryLedger(), "mine")
    await mine.join()
    await mine.submit(request("a", max_tokens=6))
    await mine.step()
    await lose(mine)
    gone(mine)

    await eventually(lambda: is_live(mine, "a"))
    assert mine.loop.scheduler.why_waits("a") is not None
    await mine.join(epoch=2)
    attachment = await mine.desk.attach("a", 0)
    await mine.run_out()
    items = [item async for item in attachment.chunks]
    tokens = tuple(token for item in items if isinstance(item, Chunk) for token in item.token_ids)
    assert tokens == output_of(request("a", max_tokens=6))


async def test_an_executor_that_nobody_drives_any_more_is_forgotten_at_the_next_look() -> None:
    """Else its requests would be given away again and again. All that others have is known before and after."""
    ledger = MemoryLedger()
    (mine, _), (_, lease) = start(ledger, "mine"), start(ledger, "other")
    tiny = PlayedExecutor("tiny", total_blocks=2)
    ledger.claim_executor(lease, "tiny", "there", inherited=False, at_least=0)
    ledger.tell_executors(lease, [tiny.facts.description])
    await mine.join()
    await mine.desk.handovers.look()
    await mine.submit(replace(request("long"), prompt=tuple(range(20))))
    await lose(mine)
    gone(mine)
    await eventually(lambda: is_live(mine, "long"))
    await mine.desk.handovers.look()
    assert mine.loop.live.runs("long")


async def test_a_request_that_becomes_durable_after_its_only_executor_has_gone_goes_after_it() -> None:
    ledger = MemoryLedger()
    (mine, _), (other, lease) = start(ledger, "mine"), start(ledger, "other")
    await mine.join()
    mine.writer.hold = True
    submitting = asyncio.create_task(mine.desk.submit(request("a"), b"d"))
    await settle()
    await lose(mine)
    await drives(other, lease, epoch=2)
    gone(mine)
    mine.writer.hold = False
    mine.writer.commit()
    await submitting
    await mine.desk.handovers.look()
    await settle()
    await obey(other, lease)
    await other.run_out()
    stored = ledger.find("a")
    assert stored is not None
    assert (stored.state, stored.lease) == (State.DONE, lease.number)
    assert len(mine.loop.live) == 0


async def test_a_request_on_its_way_to_another_scheduler_is_changed_and_read_once_it_is_there() -> None:
    ledger = MemoryLedger()
    (mine, _), (other, lease) = start(ledger, "mine"), start(ledger, "other")
    sending = asyncio.create_task(mine.desk.relay.send())
    await mine.join()
    await mine.submit(request("a", n=2, best_of=2))
    await lose(mine)
    await drives(other, lease, epoch=2)
    mine.writer.hold = True
    gone(mine)
    updating = asyncio.create_task(mine.desk.update("a", 3, None))
    attaching = asyncio.create_task(mine.desk.attach("a/1", 0))
    await settle()
    assert not updating.done()
    assert not attaching.done()
    assert (await mine.desk.status("a")).stored.state is State.PREEMPTED
    mine.writer.hold = False
    mine.writer.commit()
    await settle()
    await obey(other, lease)
    listening = asyncio.create_task(other.desk.relay.listen(lease, lambda: True, other.desk.obey))
    assert (await updating).stored.request.priority == 3
    await (await attaching).chunks.aclose()
    assert (await mine.desk.cancel("a", "")).state is State.CANCELLED
    for task in (sending, listening):
        task.cancel()


async def test_a_cancel_that_comes_from_elsewhere_while_a_request_leaves_is_not_answered_before_it_has_left() -> None:
    ledger = MemoryLedger()
    (mine, my_lease), (other, lease) = start(ledger, "mine"), start(ledger, "other")
    await mine.join()
    await mine.submit(request("a"))
    await lose(mine)
    await drives(other, lease, epoch=2)
    mine.writer.hold = True
    gone(mine)
    asking, sending = (asyncio.create_task(work) for work in (other.desk.cancel("a", ""), other.desk.relay.send()))

    async def is_asked() -> bool:
        return bool(ledger.received(my_lease))

    await eventually(is_asked)
    obeying = asyncio.create_task(obey(mine, my_lease))
    await settle()
    assert not obeying.done()
    mine.writer.hold = False
    mine.writer.commit()
    await obeying
    assert not asking.done()
    await obey(other, lease)
    assert await asking == Cancellation(State.CANCELLED, already_ended=False)
    sending.cancel()


async def test_a_request_of_a_scheduler_without_executors_goes_to_one_that_has_some() -> None:
    """It lost its own for good; what it has accepted since waits for it as long as it is patient."""
    ledger = MemoryLedger()
    (mine, _), (other, lease) = start(ledger, "mine"), start(ledger, "other")
    await mine.join()
    await lose(mine)
    await mine.submit(request("a"))
    other.executor = PlayedExecutor("another")
    ledger.claim_executor(lease, "another", "there", inherited=False, at_least=0)
    other.loop.joined(other.executor.drive())
    await other.desk.handovers.look()
    for waited_s, its_scheduler in ((PATIENCE_S - 0.1, "mine"), (0.1, "other")):
        mine.clock.now_s += waited_s
        mine.loop.handle(Tick())
        await mine.desk.handovers.look()
        await settle()
        stored = ledger.find("a")
        assert stored is not None
        assert stored.scheduler == its_scheduler
    await obey(other, lease)
    for _ in range(4):
        other.loop.answered(other.loop.drives["another"], other.executor.answer())
        await settle()
    assert (await mine.desk.status("a")).stored.state is State.DONE


async def test_a_long_request_is_not_failed_while_another_scheduler_has_an_executor_for_it() -> None:
    """Of two executors that it awaited, the large one turns out to be another scheduler's before the small one has joined."""
    ledger = MemoryLedger()
    (mine, _), (other, lease) = start(ledger, "mine"), start(ledger, "other")
    await drives(other, lease)
    mine.executor = PlayedExecutor("small", total_blocks=2)
    mine.loop.handle(ExecutorsAwaited(("large:1", "small:1")))
    await mine.submit(replace(request("long"), prompt=tuple(range(20))))
    mine.desk.handovers.executor_gone(other.executor.facts.description)
    mine.loop.handle(ExecutorsAwaited(("small:1",)))
    mine.loop.joined(mine.executor.drive())
    mine.loop.handle(ExecutorsAwaited(()))
    await mine.desk.handovers.look()
    await settle()
    stored = ledger.find("long")
    assert stored is not None
    assert (stored.state, stored.scheduler) == (State.WAITING, "other")


async def test_a_request_that_may_have_cost_one_scheduler_an_executor_fails_when_it_costs_the_next_one_too() -> None:
    ledger = MemoryLedger()
    (mine, _), (other, lease) = start(ledger, "mine"), start(ledger, "other")
    await mine.join()
    await mine.submit(request("poison"))
    mine.loop.lost(mine.loop.drives["played"], "it died")
    ledger.claim_executor(lease, "played", "here", inherited=False, at_least=0)
    gone(mine)
    await settle()
    await obey(other, lease)
    await other.join(epoch=2)
    await other.submit(request("innocent"))
    other.loop.lost(other.loop.drives["played"], "it died, too")
    await settle()
    stored = [ledger.find(name) for name in ("poison", "innocent")]
    assert [one and one.state for one in stored] == [State.FAILED, State.WAITING]


async def test_choices_of_a_request_at_several_schedulers_are_changed_by_one_call() -> None:
    """Only the second has become too long for the executor here."""
    ledger = MemoryLedger()
    (mine, my_lease), (other, lease) = start(ledger, "mine"), start(ledger, "other")
    first, second = (request("a", n=2, best_of=2), *further_choices(request("a", n=2, best_of=2)))
    ledger.write([Submission(first, b"d")], my_lease)
    ledger.claim_executor(lease, "played", "here", inherited=False, at_least=0)
    ledger.write([Handover("played", (second.request_id,), (0,))], my_lease)
    await mine.desk.handovers.take({"a": 0})
    await obey(other, lease)
    listening = [asyncio.create_task(other.desk.relay.listen(lease, lambda: True, other.desk.obey))]
    listening.append(asyncio.create_task(mine.desk.relay.send()))
    await mine.desk.update("a", 5, None)
    assert [one.request.priority for one, _ in ledger.unfinished()] == [5, 5]
    assert await mine.desk.cancel("a", "") == Cancellation(State.CANCELLED, already_ended=False)
    assert list(ledger.unfinished()) == []
    for task in listening:
        task.cancel()


@asynccontextmanager
async def cancelling_while(ledger: MemoryLedger, choice: str) -> AsyncIterator[tuple[asyncio.Task[Cancellation], Shell, Lease]]:
    """A cancel of a request of two choices, given at the scheduler that this choice is on its way to; the other is cancelled."""
    (mine, my_lease), (other, lease) = start(ledger, "mine"), start(ledger, "other")
    await mine.submit(request("a", n=2, best_of=2))
    ledger.claim_executor(lease, "played", "here", inherited=False, at_least=0)
    asking, sending = asyncio.create_task(other.desk.cancel("a", "")), asyncio.create_task(other.desk.relay.send())

    async def is_asked() -> bool:
        return bool(ledger.received(my_lease))

    await eventually(is_asked)
    mine.loop.hand_over((choice,))
    ledger.write([Handover("played", (choice,), (0,))], my_lease)
    await obey(mine, my_lease)
    await settle()
    assert not asking.done()
    yield asking, other, lease
    sending.cancel()


async def test_a_cancel_that_misses_a_choice_on_its_way_to_another_scheduler_is_given_again() -> None:
    """Found by a random life: the cancel was answered when it had reached the other choice."""
    ledger = MemoryLedger()
    async with cancelling_while(ledger, "a/1") as (asking, other, lease):
        await obey(other, lease)
        assert await asking == Cancellation(State.CANCELLED, already_ended=False)
        assert list(ledger.unfinished()) == []


async def test_a_cancel_given_again_that_finds_the_rest_ended_says_what_its_first_try_did() -> None:
    ledger = MemoryLedger()
    async with cancelling_while(ledger, "a") as (asking, other, lease):
        ledger.write([Transitioned("a", State.WAITING, State.EXPIRED, 9.0, finish_reason=FinishReason.EXPIRED)], lease)
        assert await asking == Cancellation(State.CANCELLED, already_ended=False)
        assert await other.desk.cancel("a", "again") == Cancellation(State.CANCELLED, already_ended=True)


async def test_a_long_request_is_not_failed_between_a_takeover_and_its_news() -> None:
    """Found by a random life: the large executor was no other scheduler's any more, and not awaited here yet."""
    ledger = MemoryLedger()
    (mine, my_lease), (other, lease) = start(ledger, "mine"), start(ledger, "other")
    await drives(other, lease)
    mine.executor = PlayedExecutor("small", total_blocks=2)
    mine.loop.joined(mine.executor.drive())
    ledger.take_over(my_lease, [lease.number])
    await mine.desk.handovers.look()
    await mine.submit(replace(request("long"), prompt=tuple(range(20))))
    assert (await mine.desk.status("long")).wait_code == WaitCode.NEEDS_LARGER_EXECUTOR


async def test_what_was_known_of_executors_before_one_went_elsewhere_is_forgotten() -> None:
    """With it, a request that only that one can hold would be failed as one that nobody can."""
    ledger = SlowLedger()
    (mine, _), (_, lease) = start(ledger, "mine"), start(ledger, "other")
    await mine.join()
    small, tiny = (PlayedExecutor(name, total_blocks=2) for name in ("small", "tiny"))
    mine.loop.joined(small.drive())
    ledger.claim_executor(lease, "tiny", "there", inherited=False, at_least=0)
    ledger.tell_executors(lease, [tiny.facts.description])
    looking = asyncio.create_task(mine.desk.handovers.look())
    assert await asyncio.to_thread(ledger.asked.wait, 10)
    await lose(mine)
    ledger.claim_executor(lease, "played", "here", inherited=False, at_least=0)
    gone(mine)
    await mine.submit(replace(request("long"), prompt=tuple(range(20))))
    ledger.may_answer.set()
    await looking
    await mine.submit(request("short"))
    stored = ledger.find("long")
    assert stored is not None
    assert stored.state is State.WAITING


async def test_a_command_to_take_a_request_that_comes_again_when_it_was_given_on_takes_nothing() -> None:
    ledger = MemoryLedger()
    (mine, my_lease), (other, lease), (_, third_lease) = (start(ledger, name) for name in ("mine", "other", "third"))
    await mine.submit(request("a"))
    ledger.claim_executor(lease, "played", "there", inherited=True, at_least=1)
    await other.join()
    mine.loop.hand_over(("a",))
    ledger.write([Handover("played", ("a",), (0,))], my_lease)
    commands = [command for _, command in ledger.received(lease)]
    await other.desk.obey(commands)
    assert other.loop.live.runs("a")
    await lose(other)
    ledger.claim_executor(third_lease, "played", "there", inherited=False, at_least=0)
    gone(other)
    await settle()
    await other.desk.obey(commands)
    assert not other.loop.live.has("a")
    stored = ledger.find("a")
    assert stored is not None
    assert stored.scheduler == "third"


async def test_a_command_to_take_a_request_that_comes_again_as_it_ends_does_not_begin_it_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ledger, read = MemoryLedger(), SlowRead()
    (mine, my_lease), (other, lease) = start(ledger, "mine"), start(ledger, "other")
    await mine.submit(request("a"))
    await drives(other, lease)
    ledger.write([Handover("played", ("a",), (0,))], my_lease)
    await obey(other, lease)
    monkeypatch.setattr("tokenmill_scheduler.handover.read_ledger", read)
    taking = asyncio.create_task(other.desk.handovers.take({"a": 0}))
    await settle()
    await other.run_out()
    read.may_answer.set()
    await taking
    assert not other.loop.live.has("a")


async def test_a_request_taken_twice_at_once_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ledger, read = MemoryLedger(), SlowRead()
    (mine, my_lease), (other, lease) = start(ledger, "mine"), start(ledger, "other")
    await mine.submit(request("a"))
    await drives(other, lease)
    ledger.write([Handover("played", ("a",), (0,))], my_lease)
    monkeypatch.setattr("tokenmill_scheduler.handover.read_ledger", read)
    taking = [asyncio.create_task(other.desk.handovers.take({"a": 0})) for _ in range(2)]
    await settle()
    await other.run_out()
    read.may_answer.set()
    await asyncio.gather(*taking)
    await settle()
    await other.run_out()
    assert other.executor.plans
    assert not other.loop.live.has("a")


async def test_a_request_that_is_handed_over_and_inherited_at_once_is_taken_up_once() -> None:
    """It was given on, and came back with the fallen scheduler it was given to before the news of that."""
    ledger = MemoryLedger()
    (mine, my_lease), (_, lease) = start(ledger, "mine"), start(ledger, "fallen")
    ledger.write([Submission(request("a"), b"d")], lease)
    estate = ledger.take_over(my_lease, [lease.number])
    await mine.desk.handovers.take({"a": 0})
    take_up(mine.loop, estate.requests)
    assert mine.loop.live.choices("a") == ["a"]
