"""Finds the request that kills executors, so that it fails alone and the others go on.

An executor that is lost with plans unanswered may have died of one of the sequences in them: all of these become suspects, and each
is tried by itself. An executor takes a suspect only while none of its sequences is in prefill, and admits nobody beside it, until a
result says that the suspect has computed all that it may have died of: that acquits it. So when an executor is lost with a suspect
on trial, all else in its plans has decoded before; the suspect, which two executors have now died of, fails, and the others are no
suspects.

An innocent one is blamed only when its executor happens to die of something else during its trial, which mostly is one step.
Suspicion lives in memory: a new scheduler begins without. Must not know: the order of the queue, how plans are made.
"""

from __future__ import annotations

from tokenmill_scheduler.core.executor import ExecutorState
from tokenmill_scheduler.core.live import INTERNAL, Ending, LiveRequest
from tokenmill_scheduler.core.request import FinishReason, State
from tokenmill_scheduler.core.roster import Roster
from tokenmill_scheduler.core.sequence import Sequence

_QUARANTINED = Ending(
    State.FAILED,
    FinishReason.ERROR,
    "quarantined",
    "two executors were lost while they ran this request; it is not tried again",
    INTERNAL,
)


def lose(roster: Roster, executor: ExecutorState, now_s: float, reason: str) -> None:
    """The executor is gone: what ran on it is queued again, as suspects or not, or fails."""
    involved = list(dict.fromkeys(sequence for out in executor.plans_out for sequence in out.sequences))
    on_trial = executor.probation if executor.probation in involved else None
    culprit = on_trial.live if on_trial is not None else None
    if on_trial is None:
        for sequence in involved:
            _suspect(sequence, executor)
    roster.lose(executor, now_s, reason)
    if culprit is not None:
        roster.end(culprit, _QUARANTINED, now_s)


def _suspect(sequence: Sequence, executor: ExecutorState) -> None:
    if sequence.live is not None:
        ahead = executor.description.caches_prefixes
        sequence.live.suspect_until = sequence.most_computed() if ahead else sequence.planned_computed


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
        sequence.live.suspect_until = 0
        executor.probation = None
