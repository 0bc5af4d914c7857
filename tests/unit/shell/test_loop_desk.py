"""The desk and the loop over an in-memory ledger, with an executor that answers, and a writer that commits, when told."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from structlog.testing import capture_logs
from tokenmill_scheduler import arrivals
from tokenmill_scheduler.core.request import FinishReason, State
from tokenmill_scheduler.core.scheduler import SchedulerConfig
from tokenmill_scheduler.desk.errors import IndexAhead, QueueFull, RequestEnded, RequestExists, Unavailable, UnknownRequest
from tokenmill_scheduler.desk.records import Cancellation, Chunk, Ended, Submitted
from tokenmill_scheduler.ledger.errors import LedgerConflict, LedgerUnavailable
from tokenmill_scheduler.ledger.records import RequestQuery
from tokenmill_scheduler.pacing import Pacer, Repeats
from tokenmill_scheduler.recovery import take_up

from tests.fakes.memory_ledger import MemoryLedger
from tests.fakes.shell import GRACE_S, Shell, output_of, read_all, request, settle


@pytest.fixture
async def shell() -> Shell:
    return Shell.over(MemoryLedger())


async def test_logs_name_request_executor_epoch_and_plan(shell: Shell) -> None:
    with capture_logs() as logs:
        await shell.join(epoch=7)
        await shell.submit(request("a", max_tokens=3))
        await shell.run_out()
    plans = [(line["executor"], line["epoch"], line["plan"]) for line in logs if line["event"] == "plan sent"]
    assert plans[:3] == [("played", 7, 1), ("played", 7, 2), ("played", 7, 3)]
    (end,) = [line for line in logs if line["event"] == "request done"]
    assert (end["request_id"], end["executor"], end["reason"]) == ("a", "played", "length")


async def test_plans_let_those_of_several_steps_finish_unless_something_has_happened(shell: Shell) -> None:
    facts = shell.executor.facts
    shell.executor.facts = replace(facts, description=replace(facts.description, multi_step=True))
    # Steps take a millisecond: three of them all fit, and the next plan is due at once.
    shell.loop.joined(shell.executor.drive(repeats=Repeats(max_steps=3, patience_s=1.0)))
    await shell.submit(request("a", max_tokens=30))
    for _ in range(4):
        await shell.step()
    ahead, behind = shell.executor.unanswered
    assert (ahead.max_steps, behind.max_steps, behind.after_all_steps) == (3, 3, True)
    await shell.submit(request("b", max_tokens=5))
    await shell.step()
    assert [len(plan.admit) for plan in shell.executor.unanswered] == [0, 1]
    assert not shell.executor.unanswered[-1].after_all_steps, "the plan ahead is cut short"
    await shell.run_out()


async def test_a_plan_that_needs_the_ends_ahead_waits_for_them_whatever_has_happened(shell: Shell) -> None:
    facts = shell.executor.facts
    shell.executor.facts = replace(facts, description=replace(facts.description, multi_step=True, max_num_seqs=1))
    shell.loop.joined(shell.executor.drive(repeats=Repeats(max_steps=4, patience_s=1.0)))
    await shell.submit(request("a", max_tokens=8))
    for _ in range(4):
        await shell.step()
    assert [plan.max_steps for plan in shell.executor.unanswered] == [2], "the first ends in it"
    await shell.submit(request("b", max_tokens=2))
    behind = shell.executor.unanswered[-1]
    assert (len(behind.admit), behind.after_all_steps) == (1, True)
    await shell.run_out()


# ---- submit --------------------------------------------------------------------------------------------------------------------


async def test_a_submit_is_answered_once_it_is_durable(shell: Shell) -> None:
    shell.writer.hold = True
    submitting = asyncio.create_task(shell.desk.submit(request("a"), b"d"))
    await settle()
    assert not submitting.done()
    assert shell.ledger.find("a") is None
    shell.writer.commit()
    assert await submitting == Submitted("a", joined=False)
    assert shell.desk.load().num_requests_waiting == 1


async def test_a_request_runs_to_its_end(shell: Shell) -> None:
    await shell.join()
    await shell.submit(request("a", max_tokens=5))
    attachment = await shell.desk.attach("a", 0)
    await shell.run_out()
    tokens, ended = await read_all(attachment)
    assert tokens == output_of(request("a", max_tokens=5))
    assert ended == Ended(State.DONE, FinishReason.LENGTH, 5)
    assert len(shell.loop.live) == 0


async def test_c09_equal_payloads_under_one_id_join_and_others_are_refused(shell: Shell) -> None:
    shell.writer.hold = True
    submits = [asyncio.create_task(shell.desk.submit(request("a"), digest)) for digest in (b"d", b"d", b"other")]
    await settle()
    shell.writer.commit()
    first, second, third = await asyncio.gather(*submits, return_exceptions=True)
    assert first == Submitted("a", joined=False)
    assert second == Submitted("a", joined=True)
    assert isinstance(third, RequestExists)
    shell.writer.hold = False
    assert (await shell.submit(request("a"))).joined
    with pytest.raises(RequestExists):
        await shell.submit(request("a"), b"other")
    assert len(shell.loop.live) == 1


async def test_c09_a_submit_behind_one_that_conflicts_is_judged_for_itself(shell: Shell) -> None:
    await shell.submit(request("a"), b"d")
    shell.writer.hold = True
    wrong, right = (asyncio.create_task(shell.desk.submit(request("a"), digest)) for digest in (b"other", b"d"))
    await settle()
    shell.writer.commit()
    assert isinstance((await asyncio.gather(wrong, return_exceptions=True))[0], RequestExists)
    assert await right == Submitted("a", joined=True)


async def test_c09_a_crowd_of_conflicting_submits_costs_one_write(shell: Shell) -> None:
    await shell.submit(request("a"), b"d")
    shell.writer.hold = True
    digests = [b"other" if number % 2 else b"%d" % number for number in range(100)]
    crowd = [asyncio.create_task(shell.desk.submit(request("a"), digest)) for digest in [*digests, b"d"]]
    await settle()
    assert shell.writer.backlog == 1
    shell.writer.commit()
    answers = await asyncio.wait_for(asyncio.gather(*crowd, return_exceptions=True), timeout=20)
    assert {type(answer) for answer in answers[:-1]} == {RequestExists}
    assert answers[-1] == Submitted("a", joined=True)
    assert shell.writer.backlog == 0


async def test_a_client_gone_in_mid_submit_loses_nothing(shell: Shell) -> None:
    shell.writer.hold = True
    submitting = asyncio.create_task(shell.desk.submit(request("a"), b"d"))
    await settle()
    submitting.cancel()
    await settle()
    shell.writer.commit()
    await settle()
    assert shell.loop.live.get("a") is not None


async def test_c38_the_queue_has_a_limit() -> None:
    shell = Shell.over(MemoryLedger(), max_queue_len=2)
    answers = await asyncio.gather(*[shell.desk.submit(request(name), b"d") for name in "abcde"], return_exceptions=True)
    full = [answer for answer in answers if isinstance(answer, QueueFull)]
    assert len(full) == 3
    assert all(answer.retry_delay_s for answer in full)
    assert shell.desk.load().num_requests_waiting == 2
    assert (await shell.submit(request("a"))).joined, "one that is known needs no place"


async def test_no_submit_while_the_ledger_is_away_or_the_door_is_closed(shell: Shell) -> None:
    shell.writer.outage = LedgerUnavailable("away")
    with pytest.raises(Unavailable, match="database"):
        await shell.submit(request("a"))
    shell.writer.outage = None
    shell.desk.close()
    with pytest.raises(Unavailable, match="shutting down"):
        await shell.submit(request("a"))


async def test_c73_a_submit_under_way_when_the_ledger_goes_away_is_refused_and_can_be_joined_later(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrivals, "OUTAGE_LOOK_S", 0.001)
    shell.writer.hold = True
    submitting = asyncio.create_task(shell.desk.submit(request("a"), b"d"))
    await settle()
    shell.writer.refusals = 1
    shell.writer.commit()
    with pytest.raises(Unavailable, match="under the same id"):
        await submitting
    shell.writer.commit()
    await settle()
    shell.writer.hold = False
    assert (await shell.submit(request("a"))).joined


async def test_what_was_accepted_after_its_client_was_told_otherwise_is_cancelled_after_the_grace(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Generate that ends in UNAVAILABLE between its submit and its attach, whose client does not come back."""
    monkeypatch.setattr(arrivals, "OUTAGE_LOOK_S", 0.001)
    await shell.join()
    shell.writer.hold = True
    submitting = asyncio.create_task(shell.desk.submit(request("a", max_tokens=1_000, detached=False), b"d"))
    await settle()
    shell.writer.refusals = 1
    shell.writer.commit()
    with pytest.raises(Unavailable):
        await submitting
    shell.writer.hold = False
    shell.writer.commit()
    await settle()
    assert await shell.states_after_tick("a") == [State.PREFILL]
    shell.clock.now_s += GRACE_S + 1
    assert await shell.states_after_tick("a") == [State.CANCELLED]


# ---- commit, then tell ---------------------------------------------------------------------------------------------------------


async def test_tokens_and_ends_are_told_once_durable_and_the_executor_does_not_wait(shell: Shell) -> None:
    await shell.join()
    await shell.submit(request("a", max_tokens=3))
    attachment = await shell.desk.attach("a", 0)
    shell.writer.hold = True
    await shell.run_out()
    assert len(shell.executor.plans) >= 3, "plans went on while nothing was committed"
    reading = asyncio.create_task(read_all(attachment))
    await settle()
    assert not reading.done()
    with pytest.raises(IndexAhead):
        await shell.desk.attach("a", 1)
    shell.writer.commit()
    tokens, ended = await reading
    assert tokens == output_of(request("a", max_tokens=3))
    assert ended.state is State.DONE


async def test_no_new_plans_while_the_backlog_is_full_and_new_ones_once_it_has_drained(shell: Shell) -> None:
    await shell.join()
    await shell.submit(request("a", max_tokens=10))
    shell.writer.hold = True
    shell.writer.saturated = True
    plans = len(shell.executor.plans)
    await shell.run_out()
    assert len(shell.executor.plans) == plans
    shell.writer.saturated = False
    shell.writer.commit()
    await settle()
    assert len(shell.executor.plans) > plans


async def test_a_record_that_can_never_be_written_stops_the_loop(shell: Shell) -> None:
    await shell.join()
    await shell.submit(request("a"))
    before = shell.ledger.output("a")
    shell.loop.fail(LedgerConflict("a lost lease"))
    plans = len(shell.executor.plans)
    await shell.run_out()
    assert len(shell.executor.plans) == plans
    assert shell.ledger.output("a") == before
    with pytest.raises(LedgerConflict):
        await shell.loop.failure


# ---- streams -------------------------------------------------------------------------------------------------------------------


async def test_attaching_in_the_middle_and_after_the_end(shell: Shell) -> None:
    await shell.join()
    await shell.submit(request("a", max_tokens=6))
    expected = output_of(request("a", max_tokens=6))
    await shell.step()
    await shell.step()
    middle = await shell.desk.attach("a", 1)
    assert middle.earlier == expected[:1]
    await shell.run_out()
    tokens, _ = await read_all(middle)
    assert tokens == expected
    for index in (0, 4, 6):
        late = await shell.desk.attach("a", index)
        assert late.earlier == expected[:index]
        assert await read_all(late) == (expected, Ended(State.DONE, FinishReason.LENGTH, 6))
    with pytest.raises(IndexAhead):
        await shell.desk.attach("a", 7)
    with pytest.raises(UnknownRequest):
        await shell.desk.attach("b", 0)


async def test_a_finished_request_leaves_memory_with_its_last_reader(shell: Shell) -> None:
    await shell.join()
    await shell.submit(request("a", max_tokens=2))
    one, other = await shell.desk.attach("a", 0), await shell.desk.attach("a", 0)
    await shell.run_out()
    await read_all(one)
    assert len(shell.loop.live) == 1
    await read_all(other)
    assert len(shell.loop.live) == 0


async def test_the_id_of_a_pruned_request_is_free_though_somebody_still_reads_it(shell: Shell) -> None:
    await shell.join()
    await shell.submit(request("a", max_tokens=2))
    slow = await shell.desk.attach("a", 0)
    await shell.run_out()
    shell.ledger.prune(shell.clock.now_s + 1, limit=10)
    assert not (await shell.submit(request("a", max_tokens=3))).joined
    await shell.run_out()
    tokens, _ = await read_all(slow)
    assert tokens == output_of(request("a", max_tokens=2))
    tokens, _ = await read_all(await shell.desk.attach("a", 0))
    assert tokens == output_of(request("a", max_tokens=3))
    assert len(shell.loop.live) == 0


async def test_c13_the_last_reader_of_a_request_that_is_not_detached_takes_it_along(shell: Shell) -> None:
    await shell.join()
    await shell.submit(request("a", max_tokens=2_048, detached=False))
    one, other = await shell.desk.attach("a", 0), await shell.desk.attach("a", 0)
    await shell.step()
    await one.chunks.aclose()
    await shell.step()
    status = await shell.desk.status("a")
    assert status.stored.state is State.DECODE
    plans = len(shell.executor.plans)
    await other.chunks.aclose()
    await settle()
    assert (await shell.desk.status("a")).stored.state is State.CANCELLED
    await shell.run_out()
    advanced = [plan for plan in shell.executor.plans[plans:] if plan.advance_sequence_ids]
    assert advanced == [], "no plan made after it left advances it"
    assert shell.desk.load().kv_cache_usage == 0


async def test_a_detached_request_needs_no_reader(shell: Shell) -> None:
    await shell.join()
    await shell.submit(request("a", max_tokens=3, detached=True))
    reader = await shell.desk.attach("a", 0)
    await reader.chunks.aclose()
    await shell.run_out()
    assert (await shell.desk.status("a")).stored.state is State.DONE


async def test_a_request_that_no_client_reads_is_cancelled_after_the_grace(shell: Shell) -> None:
    for name, detached in (("a", False), ("b", False), ("c", True)):
        await shell.submit(request(name, max_tokens=1_000, detached=detached))
    await shell.desk.attach("b", 0)
    shell.clock.now_s += GRACE_S + 1
    assert await shell.states_after_tick("abc") == [State.WAITING] * 3, "no client can have attached before a model is known"
    await shell.join()
    shell.clock.now_s += GRACE_S - 1
    assert State.CANCELLED not in await shell.states_after_tick("abc")
    shell.clock.now_s += 2
    states = await shell.states_after_tick("abc")
    assert [state is State.CANCELLED for state in states] == [True, False, False]


async def test_at_shutdown_streams_say_attach_again_and_nothing_is_cancelled(shell: Shell) -> None:
    await shell.join()
    await shell.submit(request("a", max_tokens=50, detached=False))
    attachment = await shell.desk.attach("a", 0)
    await shell.step()
    shell.desk.close()
    stopping = asyncio.create_task(shell.loop.stop_planning())
    await settle()
    assert not stopping.done()
    plans = len(shell.executor.plans)
    await shell.run_out()
    await stopping
    assert len(shell.executor.plans) == plans, "no new plan"
    shell.loop.live.close_streams(Unavailable("attach again", 1.0))
    told = await anext(attachment.chunks)
    assert isinstance(told, Chunk)
    with pytest.raises(Unavailable, match="attach again"):
        await anext(attachment.chunks)
    await attachment.chunks.aclose()
    stored = shell.ledger.find("a")
    assert stored is not None
    assert stored.state is State.DECODE
    assert stored.num_output_tokens == len(told.token_ids) >= 2


# ---- cancel and update ---------------------------------------------------------------------------------------------------------


async def test_c01_c11_cancel_while_waiting(shell: Shell) -> None:
    await shell.submit(request("a"))
    assert await shell.desk.cancel("a", "not needed") == Cancellation(State.CANCELLED, already_ended=False)
    await shell.join()
    await shell.submit(request("b"))
    await shell.run_out()
    prompts = [admission.token_ids for plan in shell.executor.plans for admission in plan.admit]
    assert len(prompts) == 1
    status = await shell.desk.status("a")
    assert (status.stored.state, status.stored.num_output_tokens) == (State.CANCELLED, 0)
    assert (await shell.desk.transitions("a"))[-1].reason == "not needed"


async def test_c02_cancel_while_the_last_token_is_in_flight(shell: Shell) -> None:
    await shell.join()
    await shell.submit(request("a", max_tokens=1))
    attachment = await shell.desk.attach("a", 0)
    assert shell.executor.unanswered, "the plan that makes its last token is out"
    assert await shell.desk.cancel("a", "") == Cancellation(State.CANCELLED, already_ended=False)
    await shell.run_out()
    tokens, ended = await read_all(attachment)
    assert (tokens, ended.state) == ((), State.CANCELLED)
    ends = [move for move in await shell.desk.transitions("a") if move.after in (State.DONE, State.CANCELLED)]
    assert [move.after for move in ends] == [State.CANCELLED]


async def test_c03_cancel_a_finished_request_twice(shell: Shell) -> None:
    await shell.join()
    await shell.submit(request("a", max_tokens=2))
    await shell.run_out()
    before = await shell.desk.status("a"), await shell.desk.transitions("a")
    for _ in range(2):
        assert await shell.desk.cancel("a", "too late") == Cancellation(State.DONE, already_ended=True)
    assert (await shell.desk.status("a"), await shell.desk.transitions("a")) == before


async def test_a_cancel_that_finds_the_end_not_yet_durable_waits_for_it(shell: Shell) -> None:
    await shell.join()
    await shell.submit(request("a", max_tokens=1))
    shell.writer.hold = True
    await shell.step()
    cancelling = asyncio.create_task(shell.desk.cancel("a", ""))
    await settle()
    assert not cancelling.done()
    shell.writer.commit()
    assert await cancelling == Cancellation(State.DONE, already_ended=True)


async def test_c12_a_cancel_ends_a_stream_that_waits(shell: Shell) -> None:
    await shell.submit(request("a"))
    reading = asyncio.create_task(read_all(await shell.desk.attach("a", 0)))
    await settle()
    await shell.desk.cancel("a", "")
    assert (await reading)[1] == Ended(State.CANCELLED, FinishReason.CANCELLED, 0)


async def test_an_update_is_durable_and_moves_the_request_in_the_queue() -> None:
    shell = Shell.over(MemoryLedger(), config=SchedulerConfig(policy="priority", max_num_seqs=1))
    await shell.submit(request("a", first_token=1))
    await shell.submit(request("b", first_token=2))
    status = await shell.desk.update("b", priority=7, deadline_s=None)
    assert status.stored.request.priority == 7
    await shell.join()
    assert shell.executor.plans[0].admit[0].token_ids[0] == 2
    await shell.run_out()
    with pytest.raises(RequestEnded):
        await shell.desk.update("b", priority=1, deadline_s=None)
    with pytest.raises(UnknownRequest):
        await shell.desk.update("nobody", priority=1, deadline_s=None)


# ---- crash and recovery --------------------------------------------------------------------------------------------------------


async def test_c72_an_unfinished_request_is_taken_up_from_its_stored_tokens(shell: Shell) -> None:
    await shell.join()
    running, waiting = request("a", max_tokens=8), replace(request("b", 5, max_tokens=3), priority=-1)
    await shell.submit(running)
    for _ in range(3):
        await shell.step()
    await shell.submit(waiting)
    told = shell.ledger.output("a").token_ids
    assert len(told) >= 2
    heir = Shell.over(shell.ledger)
    take_up(heir.loop, tuple(heir.ledger.unfinished()))
    assert len(heir.loop.live) == 2
    attachments = {name: await heir.desk.attach(name, index) for name, index in (("a", len(told)), ("b", 0))}
    await heir.join(epoch=2)
    await heir.run_out()
    assert (await read_all(attachments["a"]))[0] == output_of(running)
    assert (await read_all(attachments["b"]))[0] == output_of(waiting)


async def test_c40_a_lost_executors_requests_wait_and_finish_when_it_is_back(shell: Shell) -> None:
    await shell.join()
    await shell.submit(request("a", max_tokens=6))
    attachment = await shell.desk.attach("a", 0)
    await shell.step()
    await shell.step()
    shell.loop.lost(shell.loop.drives["played"], "killed")
    await settle()
    assert (await shell.desk.status("a")).stored.state is State.PREEMPTED
    assert "no executor serves" in (await shell.desk.status("a")).wait_reason
    await shell.join(epoch=2)
    await shell.run_out()
    assert (await read_all(attachment))[0] == output_of(request("a", max_tokens=6))
    assert (await shell.desk.status("a")).stored.preemptions == 1


async def test_a_deadline_ends_a_request_that_waits(shell: Shell) -> None:
    await shell.submit(request("a", deadline_s=shell.clock.now_s + 0.2))
    shell.clock.now_s += 0.2
    attachment = await shell.desk.attach("a", 0)
    async with asyncio.timeout(5):
        assert (await read_all(attachment))[1].state is State.EXPIRED


async def test_reads_come_from_the_ledger(shell: Shell) -> None:
    await shell.submit(request("a"))
    page = await shell.desk.query(RequestQuery(states=(State.WAITING,)))
    assert [stored.request.request_id for stored in page.requests] == ["a"]
    assert (await shell.desk.output("a")).token_ids == ()
    for read in (shell.desk.status, shell.desk.output, shell.desk.transitions):
        with pytest.raises(UnknownRequest):
            await read("nobody")


# ---- when plans leave ------------------------------------------------------------------------------------------------------------


class DueIn(Pacer):
    """Says of every plan that it is due in `wait_s`, however often it is asked."""

    wait_s = 0.0

    def due_s(self, now_s: float) -> float | None:
        return now_s + self.wait_s if self.plans_out < self.depth else None


@pytest.mark.parametrize(("wait_s", "plans"), [(0.0004, 2), (3600.0, 0)])
async def test_a_plan_due_sooner_than_a_timer_can_tell_leaves_at_once(shell: Shell, wait_s: float, plans: int) -> None:
    """uvloop ends such a timer at once: the loop would ask again and again until the plan is due."""
    drive = shell.executor.drive()
    drive.pacer = pacer = DueIn(2, 0.0)
    pacer.wait_s = wait_s
    shell.loop.joined(drive)
    await shell.submit(request("a", max_tokens=5))
    assert len(shell.executor.unanswered) == plans
