"""Requests that earlier processes have left unfinished are taken up again, from their prompts and their stored tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import structlog

from tokenmill_scheduler.core.request import Request, State
from tokenmill_scheduler.ledger.records import StoredOutput, StoredRequest
from tokenmill_scheduler.loop import Loop
from tokenmill_scheduler.streams import Feed

log = structlog.get_logger(__name__)

_NONE: Mapping[str, int] = {}


def take_up(
    loop: Loop,
    unfinished: Sequence[tuple[StoredRequest, StoredOutput]],
    hand_over: Callable[[str], Feed | None] = lambda request_id: None,
    losses: Mapping[str, int] = _NONE,
) -> None:
    """Queues them in this order. `hand_over` gives the feed of a request that clients here have followed at its last scheduler,
    `losses` how many executors it is suspected to have cost that one.

    Choices of one request that have not run are admitted together, as they would have been; all others one by one. What is here
    already stays as it is: a request can be handed over and come with a fallen scheduler's at once.
    """
    unfinished = [pair for pair in unfinished if not loop.live.has(pair[0].request.request_id)]
    waiting: dict[str, list[Request]] = {}
    for stored, _ in unfinished:
        if stored.state is State.WAITING:
            waiting.setdefault(stored.request.group_id, []).append(stored.request)
    for stored, output in unfinished:
        request = stored.request
        gang = waiting[request.group_id] if stored.state is State.WAITING else [request]
        if gang[0] is request:
            further = [(choice, hand_over(choice.request_id)) for choice in gang[1:]]
            suspected = losses.get(request.request_id, 0)
            loop.resume(request, stored.state, output, hand_over(request.request_id), further, suspected, stored.executor)
    if unfinished:
        tokens = sum(len(output.token_ids) for _, output in unfinished)
        detached = sum(stored.request.detached for stored, _ in unfinished)
        log.info("requests taken up again", requests=len(unfinished), detached=detached, stored_tokens=tokens)
