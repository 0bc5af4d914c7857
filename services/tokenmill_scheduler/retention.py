"""Ended requests are kept for a while, then pruned, a few at a time, so that the writer never waits long for its turn.

Must not know: what a request is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from tokenmill_scheduler.ledger.errors import LedgerUnavailable
from tokenmill_scheduler.ledger.port import Ledger

INTERVAL_S = 60.0
# Requests a transaction, and the pause between two, in which the writer has the database to itself.
BATCH = 50
PAUSE_S = 0.1

log = structlog.get_logger(__name__)


async def prune_for_ever(ledger: Ledger, retention_s: float, clock: Callable[[], float]) -> None:
    """Until cancelled. `clock` gives Unix seconds."""
    while True:
        await prune(ledger, clock() - retention_s)
        await asyncio.sleep(INTERVAL_S)


async def prune(ledger: Ledger, before_s: float) -> int:
    """Deletes what ended before then; returns how many requests it were. A database that is away is asked again another time."""
    pruned = 0
    try:
        while (some := await asyncio.to_thread(ledger.prune, before_s, BATCH)) > 0:
            pruned += some
            await asyncio.sleep(PAUSE_S)
    except LedgerUnavailable as error:
        log.warning("ended requests are not pruned for now", reason=str(error))
    if pruned:
        log.info("ended requests pruned", requests=pruned)
    return pruned
