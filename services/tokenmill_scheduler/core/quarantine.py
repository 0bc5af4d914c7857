"""Finds the request that kills executors, so that it fails alone and the others go on.

An executor that is lost with plans unanswered may have died of one of the sequences in them: all of these become suspects, and each
is tried by itself. An executor takes a suspect only while none of its sequences is in prefill, and admits nobody beside it, until a
result says that the suspect has computed all that it may have died of: that acquits it. So when an executor is lost with a suspect
on trial, all else in its plans has decoded before: the suspect fails, once it has cost as many executors as are allowed, and the
others are no suspects. An executor that comes back as the process it was has not died: what it was lost with is acquitted.

An innocent one is blamed only when its executor happens to die of something else during its trial, which mostly is one step; where
executors die often of other things, allow more than two. Suspicion lives in memory. It goes along with a request that is handed to
another scheduler; whoever takes over from a fallen one begins without. Must not know: the order of the queue, how plans are made.
"""

from __future__ import annotations

from tokenmill_scheduler.core.executor import ExecutorState
from tokenmill_scheduler.core.live import INTERNAL, Ending, LiveRequest
from tokenmill_scheduler.core.request import FinishReason, State
from tokenmill_scheduler.core.roster import Roster
from tokenmill_scheduler.core.sequence import Sequence


def lose(roster: Roster, executor: ExecutorState, now_s: float, reason: str, max_losses: int) -> None:
    """The executor is gone: what ran on it is queued again, as suspects or not, or fails as the one that cost `max_losses`."""
    involved = list(dict.fromkeys(sequence for out in executor.plans_out for sequence in out.sequences))
    on_trial = executor.probation
    accused = [on_trial] if on_trial is not None and on_trial in involved else involved
    lives = [sequence.live for sequence in accused if sequence.live is not None]
    for sequence in accused:
        _suspect(sequence, executor)
    roster.lose(executor, now_s, reason)
    for live in lives:
        if len(live.lost_with) >= max_losses:
            roster.end(live, _quarantined(live), now_s)


def _quarantined(live: LiveRequest) -> Ending:
    error = f"{len(live.lost_with)} executors were lost while they ran this request; it is not tried again"
    return Ending(State.FAILED, FinishReason.ERROR, "quarantined", error, INTERNAL)


def _suspect(sequence: Sequence, executor: ExecutorState) -> None:
    live = sequence.live
    if live is not None:
        most_computed = sequence.most_computed() if sequence.may_skip else sequence.planned_computed
        live.suspect_until = max(live.suspect_until, most_computed)
        live.lost_with.append((executor.name, executor.epoch))


def suspect_still(live: LiveRequest, losses: int) -> None:
    """It comes from another scheduler, which has lost so many executors with it: all of it is to be computed on trial."""
    if losses:
        live.suspect_until = live.known
        live.lost_with = [("", 0)] * losses


def on_trial(executor: ExecutorState) -> bool:
    """Whether a suspect runs here, or may still be in a plan that is out: then nobody else is admitted."""
    sequence = executor.probation
    return sequence is not None and (sequence.sequence_id in executor.running or sequence.plans_out > 0)


def must_wait(live: LiveRequest, executor: ExecutorState) -> bool:
    """Whether a suspect has to wait until everything that runs here has shown that it can be computed."""
    return live.suspect_until > 0 and any(s.live is not None and s.live.state is State.PREFILL for s in executor.running.values())


def acquit(executor: ExecutorState) -> None:
    """After a result: a suspect that has computed all that it may have killed an executor with is none any more."""
    sequence = executor.probation
    if sequence is not None and sequence.live is not None and sequence.computed >= sequence.live.suspect_until:
        _clear(sequence.live)
        executor.probation = None


def survived(roster: Roster, executor: str, epoch: int) -> None:
    """This executor did not die when it was lost in `epoch`, only the way to it: nobody is suspected for that any more."""
    for live in roster.requests.values():
        if (executor, epoch) in live.lost_with:
            live.lost_with.remove((executor, epoch))
            if not live.lost_with:
                _clear(live)


def _clear(live: LiveRequest) -> None:
    live.suspect_until = 0
    live.lost_with.clear()
