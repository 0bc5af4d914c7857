"""Holds and the record of actions, over the real loop and an in-memory ledger."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from tokenmill_scheduler.core.request import FinishReason, State
from tokenmill_scheduler.core.scheduler import SchedulerConfig
from tokenmill_scheduler.desk.errors import RequestNotFailed, Unavailable, UnknownExecutor, UnknownRequest
from tokenmill_scheduler.desk.records import PolicyStatus
from tokenmill_scheduler.ledger.errors import LedgerUnavailable
from tokenmill_scheduler.ledger.records import POLICY, Action, ActionQuery, ActionVerb
from tokenmill_scheduler.operators import Operators
from tokenmill_scheduler.ordering_choice import OrderingChoice
from tokenmill_scheduler.recovery import take_up

from tests.fakes.calls import eventually
from tests.fakes.memory_ledger import MemoryLedger
from tests.fakes.shell import PlayedExecutor, Shell, output_of, request, settle


@pytest.fixture
async def shell() -> Shell:
    return Shell.over(MemoryLedger())


def operators_of(shell: Shell) -> Operators:
    return Operators(shell.loop, shell.ledger, shell.desk.check_open)


def actions(shell: Shell, target: str = "") -> list[Action]:
    return list(shell.ledger.actions(ActionQuery(target)).actions)


async def paused(shell: Shell) -> bool:
    return shell.desk.load().queue_paused != ""


def choice(policy: str, *, fair_share: bool = False, batch: int = 10) -> OrderingChoice:
    return OrderingChoice(policy, fair_share, (50, 40, batch))


async def restarted(shell: Shell) -> tuple[Shell, Operators]:
    """Another process over the same ledger."""
    again = Shell.over(shell.ledger)
    operators = operators_of(again)
    await operators.refresh()
    take_up(again.loop, list(shell.ledger.unfinished()))
    return again, operators


async def test_a_policy_that_was_set_orders_what_waits_and_survives_a_restart(shell: Shell) -> None:
    operators = operators_of(shell)
    await operators.pause_queue("ann", "")
    for request_id, max_tokens in (("long", 9), ("short", 2)):
        await shell.submit(request(request_id, max_tokens=max_tokens))
    assert operators.policy() == PolicyStatus(choice("fcfs"))
    assert await operators.set_policy(choice("sjf", fair_share=True, batch=5), "ann", "many short ones")
    assert not await operators.set_policy(choice("sjf", fair_share=True, batch=5), "bob", "me too"), "it stays ann's"

    again, operators = await restarted(shell)
    assert operators.policy() == PolicyStatus(choice("sjf", fair_share=True, batch=5), "by ann: many short ones")
    assert again.desk.load().policy == "sjf"
    await again.join()
    await operators.resume_queue("ann", "")
    await settle()
    admitted = [admission.sampling.max_tokens for plan in again.executor.plans for admission in plan.admit]
    assert admitted[:2] == [2, 9]
    assert await operators.reset_policy("bob", "")
    assert not await operators.reset_policy("bob", "")
    assert operators.policy() == PolicyStatus(choice("fcfs"))
    in_words = "policy=sjf fair_share=on lane_shares=real_time=50,standard=40,batch=5"
    assert [(action.verb, action.actor, action.detail) for action in actions(again, POLICY)] == [
        (ActionVerb.RESET_POLICY, "bob", ""),
        (ActionVerb.SET_POLICY, "ann", in_words),
    ]


async def test_a_policy_set_through_one_scheduler_holds_for_all_of_its_database(shell: Shell) -> None:
    mine, other = operators_of(shell), Shell.over(shell.ledger)
    theirs = operators_of(other)
    for turn in (choice("edf"), choice("lpm")):
        await theirs.set_policy(turn, "ann", "")
        await mine.refresh()
        assert mine.policy().choice == turn
    await theirs.reset_policy("ann", "")
    await mine.refresh()
    assert shell.desk.load().policy == "fcfs"


async def test_a_policy_that_this_version_does_not_know_leaves_that_of_the_settings_in_force(shell: Shell) -> None:
    newer = "policy=later fair_share=on lane_shares=batch=100"
    shell.ledger.write([Action(1.0, "ann", ActionVerb.SET_POLICY, POLICY, "", newer)])
    operators = operators_of(shell)
    await operators.refresh()
    assert operators.policy().choice == choice("fcfs")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "policy=sjf",
        "policy=sjf fair_share=maybe lane_shares=batch=1",
        "policy=sjf fair_share=on lane_shares=batch=101",
        "policy=sjf fair_share=on lane_shares=batch=60,standard=50",
        "policy=sjf fair_share=on lane_shares=other=1",
        "policy=none fair_share=on lane_shares=batch=1",
    ],
)
def test_the_record_of_a_policy_is_read_with_care(text: str) -> None:
    with pytest.raises(ValueError, match=r"record of a policy|no policy|per cent"):
        OrderingChoice.parse(text)


async def test_a_paused_queue_says_by_whom_and_why_and_survives_a_restart(shell: Shell) -> None:
    operators = operators_of(shell)
    await shell.join()
    assert await operators.pause_queue("ann", "new model")
    assert not await operators.pause_queue("bob", "me too"), "it stays ann's"
    await shell.submit(request("a"))
    assert shell.executor.plans == []
    assert shell.desk.load().queue_paused == "by ann: new model"
    assert (await shell.desk.status("a")).wait_reason == "the queue is paused by ann: new model"

    again, operators = await restarted(shell)
    await again.join()
    assert again.executor.plans == []
    assert await operators.resume_queue("bob", "")
    assert not await operators.resume_queue("bob", "")
    assert again.desk.load().queue_paused == ""
    await settle()
    await again.run_out()
    assert (await again.desk.status("a")).stored.state is State.DONE
    verbs = [(action.verb, action.actor, action.reason) for action in actions(shell)]
    assert verbs == [(ActionVerb.RESUME_QUEUE, "bob", ""), (ActionVerb.PAUSE_QUEUE, "ann", "new model")]


async def test_a_drained_executor_stays_so_across_a_restart_and_its_work_goes_elsewhere(shell: Shell) -> None:
    operators = operators_of(shell)
    await shell.join()
    await shell.submit(request("a", max_tokens=6))
    status = await operators.drain_executor("played", "ann", "new driver")
    assert (status.draining, status.connected) == (True, True)
    await shell.run_out()
    assert (await shell.desk.status("a")).wait_reason == "executor played is drained by ann: new driver"
    other = PlayedExecutor("other")
    shell.loop.joined(other.drive())
    await settle()
    while other.unanswered:
        shell.loop.answered(shell.loop.drives["other"], other.answer())
        await settle()
    assert (await shell.desk.status("a")).stored.state is State.DONE
    assert shell.ledger.output("a").token_ids == output_of(request("a", max_tokens=6))

    again, operators = await restarted(shell)
    await again.join()
    assert again.desk.executors()[0].draining
    assert not (await operators.undrain_executor("played", "ann", "")).draining
    assert [action.verb for action in actions(shell, "played")] == [ActionVerb.UNDRAIN_EXECUTOR, ActionVerb.DRAIN_EXECUTOR]


async def test_a_drain_ends_also_before_its_executor_has_joined(shell: Shell) -> None:
    await shell.join()
    await operators_of(shell).drain_executor("played", "ann", "new driver")

    again, operators = await restarted(shell)
    await operators.pause_queue("ann", "")
    status = await operators.undrain_executor("played", "ann", "")
    assert (status.name, status.connected, status.draining) == ("played", False, False)
    assert [action.verb for action in actions(shell, "played")] == [ActionVerb.UNDRAIN_EXECUTOR, ActionVerb.DRAIN_EXECUTOR]
    await again.join()
    assert not again.desk.executors()[0].draining
    # Neither joined nor drained; the last two are what other holds are kept under.
    for name in ("nobody", "", POLICY):
        with pytest.raises(UnknownExecutor):
            await operators.undrain_executor(name, "ann", "")
    assert await paused(again)


async def test_what_another_scheduler_of_the_database_holds_back_holds_here_too(shell: Shell) -> None:
    other = Shell.over(shell.ledger)
    mine, theirs = operators_of(shell), operators_of(other)
    await theirs.pause_queue("ann", "")
    await mine.refresh()
    assert shell.desk.load().queue_paused == "by ann"
    await mine.resume_queue("bob", "")
    await theirs.refresh()
    assert other.desk.load().queue_paused == ""


async def test_a_change_at_one_scheduler_is_known_to_the_next_change_at_another_before_it_looks(shell: Shell) -> None:
    other = Shell.over(shell.ledger)
    mine, theirs = operators_of(shell), operators_of(other)
    await theirs.pause_queue("ann", "")
    assert not await mine.pause_queue("bob", "me too"), "it stays ann's"
    assert await mine.resume_queue("bob", ""), "it was paused"
    assert list(shell.ledger.holds()) == []
    assert await theirs.pause_queue("ann", "again"), "it was not paused any more"
    await mine.set_policy(choice("sjf"), "bob", "")
    assert await theirs.reset_policy("ann", "")
    assert await mine.set_policy(choice("sjf"), "bob", ""), "it was reset"
    assert [hold.target for hold in shell.ledger.holds()] == ["", POLICY]


async def test_what_was_read_before_a_change_was_durable_does_not_undo_it(shell: Shell) -> None:
    operators = operators_of(shell)
    shell.writer.hold = True
    pausing = asyncio.create_task(operators.pause_queue("ann", ""))
    await settle()
    await operators.refresh()
    assert shell.desk.load().queue_paused == "by ann"
    shell.writer.commit()
    assert await pausing
    await operators.refresh()
    assert shell.desk.load().queue_paused == "by ann"


async def test_an_operator_who_goes_in_mid_change_stops_nobody_from_seeing_later_ones(shell: Shell) -> None:
    operators = operators_of(shell)
    shell.writer.hold = True
    pausing = asyncio.create_task(operators.pause_queue("ann", ""))
    await eventually(lambda: paused(shell))
    pausing.cancel()
    await settle()
    shell.writer.hold = False
    shell.writer.commit()
    await settle()
    assert shell.desk.load().queue_paused == "by ann"
    await operators_of(shell).refresh()
    _, elsewhere = await restarted(shell)
    assert await elsewhere.resume_queue("bob", "")
    await operators.refresh()
    assert shell.desk.load().queue_paused == ""


async def test_nothing_is_held_back_while_the_ledger_is_away_or_the_scheduler_stops(shell: Shell) -> None:
    operators = operators_of(shell)
    shell.writer.outage = LedgerUnavailable("away")
    with pytest.raises(Unavailable):
        await operators.pause_queue("ann", "")
    shell.writer.outage = None
    shell.ledger.unavailable = True
    with pytest.raises(Unavailable):
        await operators.actions(ActionQuery())
    shell.desk.close()
    with pytest.raises(Unavailable):
        await operators.resume_queue("ann", "")


async def test_changes_of_requests_are_recorded_with_what_they_changed(shell: Shell) -> None:
    await shell.submit(request("a", priority=1))
    await shell.desk.update("a", 5, 2_000.0, "important", "ann")
    await shell.desk.update("a", 6, None)
    await shell.desk.cancel("a", "not needed", "bob")
    await shell.desk.cancel("a", "twice", "bob")
    cancel, update = actions(shell, "a")
    assert (update.actor, update.verb, update.reason) == ("ann", ActionVerb.UPDATE, "important")
    assert update.detail == "priority 1 → 5; deadline none → 1970-01-01T00:33:20+00:00"
    assert (cancel.actor, cancel.verb, cancel.reason) == ("bob", ActionVerb.CANCEL, "not needed")


async def test_an_action_is_in_the_transaction_of_what_it_does(shell: Shell) -> None:
    await shell.submit(request("a"))
    before = shell.ledger.writes
    await shell.desk.cancel("a", "", "ann")
    assert shell.ledger.writes == before + 1


async def test_a_failed_request_is_tried_again_as_a_new_one() -> None:
    shell = Shell.over(MemoryLedger(), config=SchedulerConfig(max_num_seqs=1))
    await shell.submit(request("a", deadline_s=1_030.0, queue_deadline_s=1_010.0, priority=3, detached=False))
    with pytest.raises(RequestNotFailed):
        await shell.desk.retry("a", "b", "", "ann")
    for epoch in (1, 2):
        await shell.join(epoch)
        shell.loop.lost(shell.loop.drives["played"], "killed")
        await settle()
    failed = (await shell.desk.status("a")).stored
    assert (failed.state, failed.error_code) == (State.FAILED, 13), "quarantined"
    shell.clock.now_s += 100.0
    await shell.desk.retry("a", "b", "mended", "ann")
    (retry,) = actions(shell, "a")
    assert (retry.verb, retry.actor, retry.reason, retry.detail) == (ActionVerb.RETRY, "ann", "mended", "as b")
    again = (await shell.desk.status("b")).stored.request
    assert (again.retry_of, again.prompt, again.sampling, again.priority) == (
        "a",
        failed.request.prompt,
        failed.request.sampling,
        3,
    )
    waited_s = 1_100.0 - failed.request.arrival_s
    assert (again.arrival_s, again.deadline_s, again.queue_deadline_s) == (1_100.0, 1_030.0 + waited_s, 1_010.0 + waited_s)
    assert again.detached, "no client waits for it"
    with pytest.raises(UnknownRequest):
        await shell.desk.retry("nobody", "c", "", "ann")


async def test_c69_every_request_has_one_end_whatever_operators_do() -> None:
    shell = Shell.over(MemoryLedger(), config=SchedulerConfig(max_num_seqs=4))
    operators = operators_of(shell)
    await shell.join()
    names = [f"r{number}" for number in range(12)]
    for number, name in enumerate(names):
        await shell.submit(request(name, first_token=number, max_tokens=5, queue_deadline_s=1_005.0 if number == 11 else None))
    await shell.step()
    await operators.pause_queue("ann", "")
    await operators.drain_executor("played", "ann", "")
    for name in ("r0", "r7"):
        await shell.desk.cancel(name, "", "ann")
    shell.clock.now_s += 10.0
    await operators.undrain_executor("played", "ann", "")
    await operators.resume_queue("ann", "")
    await shell.run_out()
    ended = [(await shell.desk.status(name)).stored for name in names]
    reasons = Counter(stored.finish_reason for stored in ended)
    assert reasons == {FinishReason.LENGTH: 9, FinishReason.CANCELLED: 2, FinishReason.EXPIRED: 1}
    assert [stored.first_token_s is not None for stored in ended] == [stored.num_output_tokens > 0 for stored in ended]
    assert all(
        shell.ledger.output(name).token_ids == output_of(stored.request)[: stored.num_output_tokens]
        for name, stored in zip(names, ended, strict=True)
    )
    load = shell.desk.load()
    assert (load.num_requests_running, load.num_requests_waiting) == (0, 0)
