"""What changes make of a request, and what is answered. Pure. Must not know: the loop, the ledger."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime

from tokenmill_scheduler.core.request import TERMINAL, Request, State
from tokenmill_scheduler.desk.records import Cancellation
from tokenmill_scheduler.ledger.records import Command, Verb


def second_try(failed: Request, request_id: str, now_s: float) -> Request:
    """The same payload, with its time limits counted from now. No client waits for it, so it runs detached.

    Of a request for several choices, the one that failed, by itself.
    """
    waited_s = now_s - failed.arrival_s
    return replace(
        failed,
        request_id=request_id,
        arrival_s=now_s,
        deadline_s=None if failed.deadline_s is None else failed.deadline_s + waited_s,
        queue_deadline_s=None if failed.queue_deadline_s is None else failed.queue_deadline_s + waited_s,
        detached=True,
        retry_of=failed.request_id,
        parent="",
        choice=0,
        n=1,
        best_of=1,
    )


def changes_in_words(request: Request, priority: int | None, deadline_s: float | None) -> str:
    """Of an update; None leaves a value as it is."""
    changes = []
    if priority is not None:
        changes.append(f"priority {request.priority} → {priority}")
    if deadline_s is not None:
        changes.append(f"deadline {_time(request.deadline_s)} → {_time(deadline_s)}")
    return "; ".join(changes)


def has_changed(before: Request, after: Request, command: Command) -> bool:
    """Whether an update is to be seen in a request; a cancelled one has ended instead.

    A value that is neither as it was nor as this update wants it is a later one's, which found what this one had made of it.
    """
    values = (command.priority, before.priority, after.priority), (command.deadline_s, before.deadline_s, after.deadline_s)
    return command.verb is Verb.UPDATE and all(new is None or now == new or now != was for new, was, now in values)


def cancellation(before: Mapping[str, State], after: Mapping[str, State]) -> Cancellation:
    """The answer to a cancel: the states of a request's choices, in order, ahead of its first try and after its last.

    One cancelled choice makes the request a cancelled one, whatever became of the others: a cancel that is given again is answered
    with the same state.
    """
    state = State.CANCELLED if State.CANCELLED in after.values() else next(iter(after.values()))
    did_cancel = any(after[choice] is State.CANCELLED for choice, had in before.items() if had not in TERMINAL)
    return Cancellation(state, already_ended=not did_cancel)


def _time(unix_s: float | None) -> str:
    return "none" if unix_s is None else datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="seconds")
