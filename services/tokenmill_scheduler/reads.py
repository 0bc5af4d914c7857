"""A read of the ledger from the event loop: in a thread, and what goes wrong in the desk's words. Must not know: what is read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from tokenmill_scheduler.desk.errors import Unavailable
from tokenmill_scheduler.ledger.errors import LedgerUnavailable

T = TypeVar("T")
RETRY_DELAY_S = 1.0


async def read_ledger(read: Callable[..., T], *arguments: object) -> T:
    """Raises Unavailable."""
    try:
        return await asyncio.to_thread(read, *arguments)
    except LedgerUnavailable as error:
        raise Unavailable("the database cannot be read for now", RETRY_DELAY_S) from error
