"""Rules that hold after every event, as assertions for tests and simulations: too slow, and of no use, in production.

Each function checks one thing that the design promises; `check` is all of them.
"""

from __future__ import annotations

from tokenmill_scheduler.core.backlog import most_tokens
from tokenmill_scheduler.core.executor import ExecutorState
from tokenmill_scheduler.core.queue import WaitingQueue
from tokenmill_scheduler.core.request import QUEUED, RUNNING, TERMINAL, Lane, State
from tokenmill_scheduler.core.roster import Roster
from tokenmill_scheduler.core.scheduler import Scheduler
from tokenmill_scheduler.core.sequence import Sequence


def check(scheduler: Scheduler) -> None:
    """Raises AssertionError when the scheduler is in a state it must never be in."""
    roster = scheduler._roster
    check_requests(roster)
    check_queues(roster)
    check_usage(roster)
    for executor in roster.executors.values():
        check_sequences(executor, roster)
        check_plans(executor)
        check_forecast(executor)
        check_quarantine(executor)
    assert not roster.effects, "effects left behind"


def check_requests(roster: Roster) -> None:
    """A request that has not ended is in one place: running on one executor, or in its model's queue."""
    for request_id, live in roster.requests.items():
        assert live.request_id == request_id
        assert live.state not in TERMINAL, f"{request_id} has ended and is still here"
        assert len(live.output) <= live.request.sampling.max_tokens, f"{request_id} has more tokens than it may"
        queued = live.entry in roster.queue(live.request.model)
        if live.gang is not None:
            assert live in live.gang
            assert all(choice.gang is live.gang and choice.state is State.WAITING for choice in live.gang), "a gang broke up"
        assert queued == (live.state in QUEUED), f"{request_id} is {live.state} and the queue disagrees"
        if live.state in RUNNING:
            assert live.sequence is not None, f"{request_id} runs nowhere"
            assert live.sequence.sequence_id in roster.executors[live.sequence.executor].running
        if live.sequence is not None:
            assert live.sequence.live is live, f"{request_id}'s sequence is another's"
            assert live.state is not State.WAITING
    assert len(roster.deadlines) == sum(live.expires_s is not None for live in roster.requests.values())


def check_queues(roster: Roster) -> None:
    for model, queue in roster.queues.items():
        check_lines(queue)
        assert all(roster.requests.get(live.request_id) is live for live in queue), f"the queue of {model} has a stranger"
    assert sum(map(len, roster.queues.values())) == sum(live.state in QUEUED for live in roster.requests.values())


def check_lines(queue: WaitingQueue) -> None:
    """Each line is in order, none is empty, and the tenants that wait are those that have a line."""
    for lane in queue.lanes.values():
        for line in lane.lines.values():
            line.check()
            assert line, "an empty line is kept"
        assert sorted(name for _, name in lane.share.order()) == sorted(lane.lines)
        assert lane.share.order() == sorted(lane.share.order())
    assert queue.num_resuming == sum(live.state is State.PREEMPTED for live in queue)


def check_usage(roster: Roster) -> None:
    """What tenants are counted with is what is there: every sequence until its blocks are back, every request that waits."""
    running = [s for executor in roster.executors.values() for s in executor.running.values()]
    leaving = [s for executor in roster.executors.values() for s in executor.leaving.values()]
    held = roster.quotas._held
    assert held.keys() == {s.sequence_id for s in (*running, *leaving)}
    assert {sequence_id for sequence_id, its in held.items() if its.runs} == {s.sequence_id for s in running}
    for tenant in {its.tenant for its in held.values()} | roster.quotas._usage.keys():
        its = [held_ for held_ in held.values() if held_.tenant == tenant]
        assert roster.quotas.in_use(tenant) == (sum(h.runs for h in its), sum(h.blocks for h in its)), f"{tenant} is miscounted"
    waiting = [live.request for live in roster.requests.values() if live.state in QUEUED]
    assert roster.backlog.tokens(*Lane) == sum(map(most_tokens, waiting)), "the backlog is miscounted"


def check_sequences(executor: ExecutorState, roster: Roster) -> None:
    """Known, computed and planned tokens add up; a sequence that leaves is on its way out."""
    for sequence in [*executor.running.values(), *executor.leaving.values()]:
        booked = [
            (count, out.plan.max_steps)
            for out in executor.plans_out
            for s, count in zip(out.sequences, out.plan.advance_max_tokens, strict=True)
            if s is sequence
        ]
        assert sequence.bookings == booked
        computed, known = sequence.computed, sequence.known
        for count, steps in booked:
            left, goes_on = count, True
            for step in range(steps):
                if goes_on and left and known < sequence.limit:
                    taken = min(1 if step else left, known - computed)
                    computed, left = computed + taken, left - taken
                    goes_on = computed == known
                    known += goes_on
        assert (sequence.planned_computed, sequence.planned_known) == (computed, known)
        assert not sequence.predicted or sequence.computed == 0
        assert 0 <= sequence.computed <= sequence.known
        if sequence.live is not None:
            assert roster.requests.get(sequence.live.request_id) is sequence.live
            assert sequence.known == sequence.live.known, "a token was lost or doubled"
            assert sequence.planned_known <= sequence.limit, "planned past its limit"
    for sequence in executor.running.values():
        assert sequence.live is not None, "a sequence runs for nobody"
        assert sequence.live.sequence is sequence
    lanes = [sequence.live.request.lane for sequence in executor.running.values() if sequence.live is not None]
    assert executor.running_by_lane == {lane: lanes.count(lane) for lane in Lane}
    executor.coming.check(executor.running)
    check_leaving(executor)


def check_leaving(executor: ExecutorState) -> None:
    """Each given-up sequence is released once: in the next plan, in one that is out, or it waits for its last plan to return."""
    released = [sequence_id for out in executor.plans_out for sequence_id in out.plan.release] + executor.to_release
    assert len(set(released)) == len(released), "a sequence is released twice"
    assert not executor.running.keys() & executor.leaving.keys()
    for sequence_id, sequence in executor.leaving.items():
        assert (sequence_id in released) != sequence.finished, "a sequence leaves and nobody releases it"
        assert not sequence.finished or sequence.plans_out, "a finished sequence outstays its last plan"
        assert sequence.live is None or sequence.plans_out, "a preempted request waits for nothing"


def check_plans(executor: ExecutorState) -> None:
    """Never more plans out than the pipeline takes, in order, within slots and token budget, no sequence twice."""
    assert len(executor.plans_out) <= executor.description.pipeline_depth
    ids = [out.plan.plan_id for out in executor.plans_out]
    assert ids == list(range(executor.last_plan_id - len(ids) + 1, executor.last_plan_id + 1))
    for out in executor.plans_out:
        plan = out.plan
        assert plan.epoch == executor.epoch
        assert sum(plan.advance_max_tokens) <= executor.max_num_batched_tokens, "over the token budget"
        assert len(plan.advance_sequence_ids) <= executor.max_num_seqs, "over the slots"
        assert len(set(plan.advance_sequence_ids)) == len(plan.advance_sequence_ids), "a sequence twice in a plan"
        assert {a.sequence_id for a in plan.admit} <= set(plan.advance_sequence_ids), "admitted and not advanced"
        assert all(count > 0 for count in plan.advance_max_tokens)
    if len(ids) > 1 and executor.plans_out[-2].plan.max_steps > 1 and not executor.plans_out[-1].plan.after_all_steps:
        assert len(executor.running) <= executor.max_num_seqs, "a slot is planned with that a plan cut short does not free"
    assert executor.slots_taken <= executor.max_num_seqs
    assert len(executor.executing()) <= executor.max_num_seqs, "more run at once than there are slots"


def check_quarantine(executor: ExecutorState) -> None:
    """At most one suspect runs, and while it does everything beside it has decoded before."""
    suspects = [s for s in executor.running.values() if s.live is not None and s.live.suspect_until]
    assert suspects in ([], [executor.probation]), "a suspect runs that is not on trial"
    if suspects:
        others = [s.live.state for s in executor.running.values() if s is not suspects[0] and s.live is not None]
        assert State.PREFILL not in others, "a suspect is tried beside one that has not decoded"


def check_forecast(executor: ExecutorState) -> None:
    """The promises add up, and cover all that the plans out can take."""
    forecast = executor.forecast
    sequences: list[Sequence] = [*executor.running.values(), *executor.leaving.values()]
    assert forecast.promised == sum(sequence.reserved - sequence.held for sequence in sequences)
    for sequence in sequences:
        assert sequence.held == forecast.held(sequence)
        assert sequence.reserved >= max(sequence.held, forecast.most_held(sequence))
    if not executor.joined:
        assert not sequences
        assert not executor.plans_out
        assert not executor.to_release
        assert forecast.free == 0
    else:
        assert executor.blocks.total == executor.description.num_blocks
