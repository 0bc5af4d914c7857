"""A request of several choices through the desk and the loop: counted, streamed, changed, left and taken up as a whole."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from tokenmill_scheduler.core.choices import choice_ids, further_choices
from tokenmill_scheduler.core.events import Expired
from tokenmill_scheduler.core.request import FinishReason, Request, State
from tokenmill_scheduler.core.scheduler import SchedulerConfig
from tokenmill_scheduler.desk.errors import IndexAhead, QueueFull, RequestEnded
from tokenmill_scheduler.desk.records import Cancellation, Ended
from tokenmill_scheduler.ledger.records import ActionQuery, RequestQuery
from tokenmill_scheduler.recovery import take_up

from tests.fakes.memory_ledger import MemoryLedger
from tests.fakes.shell import Shell, output_of, read_all, request, settle


def group(request_id: str = "a", n: int = 3, max_tokens: int = 4, detached: bool = True) -> Request:
    return request(request_id, max_tokens=max_tokens, detached=detached, n=n, best_of=n)


@pytest.fixture
async def shell() -> Shell:
    return Shell.over(MemoryLedger())


def states(shell: Shell, request_id: str = "a", n: int = 3) -> list[State]:
    found = [shell.ledger.find(name) for name in choice_ids(group(request_id, n))]
    return [stored.state for stored in found if stored is not None]


async def test_c38_n_counts_as_n() -> None:
    """Queue limit 2, nothing runs: one of two choices fills it, and one of three never fits."""
    shell = Shell.over(MemoryLedger(), max_queue_len=2)
    with pytest.raises(QueueFull) as never:
        await shell.submit(group("never", n=3))
    assert never.value.retry_delay_s is None, "coming again is of no use"
    await shell.submit(group("a", n=2))
    refused = []
    for name in "bcde":
        with pytest.raises(QueueFull, match="2 requests are queued") as full:
            await shell.submit(request(name))
        refused.append(full.value.retry_delay_s)
    assert all(delay is not None and delay > 0 for delay in refused)
    assert shell.desk.load().num_requests_waiting == 2
    assert [stored.request.request_id for stored in shell.ledger.query(RequestQuery(oldest_first=True)).requests] == ["a", "a/1"]


async def test_c38_choices_on_their_way_to_disk_count_too() -> None:
    shell = Shell.over(MemoryLedger(), max_queue_len=4)
    shell.writer.hold = True
    arriving = asyncio.create_task(shell.desk.submit(group("a", n=3), b"d"))
    await settle()
    with pytest.raises(QueueFull):
        await shell.desk.submit(group("b", n=2), b"d")
    last = asyncio.create_task(shell.desk.submit(request("c"), b"d"))
    await settle()
    shell.writer.commit()
    await asyncio.gather(arriving, last)
    assert shell.desk.load().num_requests_waiting == 4


async def test_each_choice_has_its_own_stream_and_they_run_together(shell: Shell) -> None:
    await shell.join()
    await shell.submit(group())
    attachments = await shell.desk.attach_all(dict.fromkeys(choice_ids(group()), 0))
    await shell.run_out()
    for attachment in attachments:
        assert await read_all(attachment) == (output_of(group()), Ended(State.DONE, FinishReason.LENGTH, 4))
    assert len(shell.loop.live) == 0


async def test_an_index_ahead_of_one_choice_leaves_no_reader_at_the_others(shell: Shell) -> None:
    await shell.join()
    await shell.submit(group(detached=False))
    with pytest.raises(IndexAhead):
        await shell.desk.attach_all({"a": 0, "a/1": 1})
    assert states(shell) == [State.PREFILL] * 3
    assert shell.loop.live.num_readers == 0


async def test_c10_cancelling_the_request_ends_every_choice(shell: Shell) -> None:
    await shell.join()
    await shell.submit(group(max_tokens=50))
    await shell.step()
    assert await shell.desk.cancel("a/1", "this one alone") == Cancellation(State.CANCELLED, already_ended=False)
    assert State.CANCELLED not in states(shell)[::2]
    assert await shell.desk.cancel("a", "all") == Cancellation(State.CANCELLED, already_ended=False)
    assert states(shell) == [State.CANCELLED] * 3
    assert await shell.desk.cancel("a", "again") == Cancellation(State.CANCELLED, already_ended=True)
    await shell.run_out()
    assert (shell.desk.load().num_requests_running, len(shell.loop.live)) == (0, 0)


async def test_a_request_whose_first_choice_has_ended_can_still_be_cancelled_and_updated(shell: Shell) -> None:
    await shell.join()
    await shell.submit(group(max_tokens=50))
    await shell.step()
    shell.loop.handle(_ended_by_deadline("a"))
    await settle()
    assert states(shell)[0] is State.EXPIRED
    await shell.desk.update("a", 7, None)
    assert [found.request.priority for name in ("a/1", "a/2") if (found := shell.ledger.find(name))] == [7, 7]
    assert await shell.desk.cancel("a", "") == Cancellation(State.CANCELLED, already_ended=False)
    assert states(shell) == [State.EXPIRED, State.CANCELLED, State.CANCELLED]
    assert await shell.desk.cancel("a", "again") == Cancellation(State.CANCELLED, already_ended=True)
    with pytest.raises(RequestEnded):
        await shell.desk.update("a", 8, None)


async def test_of_updates_at_once_each_is_carried_out_and_recorded_once(shell: Shell) -> None:
    """The first finds another value than its own when it is durable: it is not given again, which would undo the others'."""
    await shell.submit(group())
    shell.writer.hold = True
    priorities = {"ann": 7, "bob": 5, "cid": 0}
    updates = [asyncio.create_task(shell.desk.update("a", to, None, "", actor)) for actor, to in priorities.items()]
    await settle()
    shell.writer.hold = False
    shell.writer.commit()
    await asyncio.gather(*updates)
    assert [found.request.priority for name in choice_ids(group()) if (found := shell.ledger.find(name))] == [0, 0, 0]
    assert [action.actor for action in shell.ledger.actions(ActionQuery()).actions] == ["cid", "bob", "ann"]


async def test_an_update_that_waits_for_a_choice_on_its_way_is_not_carried_out_again_on_all(shell: Shell) -> None:
    await shell.submit(group())
    shell.writer.hold = True
    updating = asyncio.create_task(shell.desk.update("a", 7, None, "", "ann"))
    await settle()
    moving = shell.loop.live.get("a/1")
    assert moving is not None
    moving.leaving = True
    shell.writer.hold = False
    shell.writer.commit()
    await settle()
    await shell.desk.update("a/2", 3, None)
    assert not updating.done()
    moving.leaving = False
    await updating
    assert [found.request.priority for name in choice_ids(group()) if (found := shell.ledger.find(name))] == [7, 7, 3]
    assert [action.actor for action in shell.ledger.actions(ActionQuery()).actions] == ["ann"]


async def test_an_update_of_one_choice_is_for_it_alone(shell: Shell) -> None:
    await shell.submit(group())
    await shell.desk.update("a/2", 7, None)
    assert [found.request.priority for name in choice_ids(group()) if (found := shell.ledger.find(name))] == [0, 0, 7]


async def test_c13_the_last_reader_of_each_choice_takes_it_along(shell: Shell) -> None:
    await shell.join()
    await shell.submit(group(max_tokens=50, detached=False))
    attachments = await shell.desk.attach_all(dict.fromkeys(choice_ids(group()), 0))
    await shell.step()
    for attachment in attachments:
        await attachment.chunks.aclose()
    await settle()
    assert states(shell) == [State.CANCELLED] * 3


async def test_one_failed_choice_is_tried_again_by_itself(shell: Shell) -> None:
    ledger = shell.ledger
    await shell.submit(group())
    shell.loop.handle(_ended_by_deadline("a/1"))
    await settle()
    entry = ledger._entries["a/1"]
    ledger._entries["a/1"] = replace(entry, stored=replace(entry.stored, state=State.FAILED))
    await shell.desk.retry("a/1", "again", "", "ann")
    found = ledger.find("again")
    assert found is not None
    assert (found.request.retry_of, found.request.n, found.request.choice, found.request.parent) == ("a/1", 1, 0, "")
    assert found.request.sampling == further_choices(group())[0].sampling


async def test_c72_a_group_that_has_not_run_is_taken_up_as_one_and_one_that_has_choice_by_choice() -> None:
    ledger = MemoryLedger()
    config = SchedulerConfig(max_num_seqs=3)
    shell = Shell.over(ledger, config=config)
    await shell.join()
    await shell.submit(group("ran", n=2, max_tokens=9))
    for _ in range(4):
        await shell.step()
    await shell.submit(group("waits", max_tokens=9))
    heir = Shell.over(ledger, config=config)
    take_up(heir.loop, list(ledger.unfinished()))
    await settle()
    assert heir.loop.scheduler.num_waiting == 5
    names = [*choice_ids(group("ran", n=2)), *choice_ids(group("waits"))]
    counts = {name: len(ledger.output(name).token_ids) for name in names}
    assert counts["ran"] > 0
    attachments = await heir.desk.attach_all(counts)
    await heir.join(epoch=2)
    await heir.run_out()
    assert [len(plan.admit) for plan in heir.executor.plans if plan.admit] == [2, 3], (
        "one slot is free, and no choice takes it alone"
    )
    for attachment in attachments:
        tokens, ended = await read_all(attachment)
        assert (tokens, ended.state) == (output_of(group(max_tokens=9)), State.DONE)


def _ended_by_deadline(request_id: str) -> Expired:
    return Expired(request_id, "for a test")
