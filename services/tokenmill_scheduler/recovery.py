"""On start: every request that had not ended is taken up again, from its prompt and its stored tokens."""

from __future__ import annotations

import asyncio

import structlog

from tokenmill_scheduler.ledger.port import Ledger
from tokenmill_scheduler.loop import Loop

log = structlog.get_logger(__name__)


async def recover(ledger: Ledger, loop: Loop) -> int:
    """How many there were. They are queued before anything new, in their order of arrival."""
    unfinished = await asyncio.to_thread(lambda: list(ledger.unfinished()))
    for stored, output in unfinished:
        loop.resume(stored.request, stored.state, output)
    if unfinished:
        tokens = sum(len(output.token_ids) for _, output in unfinished)
        detached = sum(stored.request.detached for stored, _ in unfinished)
        log.info("requests taken up again", requests=len(unfinished), detached=detached, stored_tokens=tokens)
    return len(unfinished)
