"""A SQLite file has one scheduler, which holds a lock beside it.

Must not know: tables. Schedulers that share a PostgreSQL database keep apart by leases.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tokenmill_service.lock_file import take_lock

from tokenmill_scheduler.ledger.engine import parse_url
from tokenmill_scheduler.ledger.errors import LedgerUnavailable


@contextmanager
def database_lock(url: str) -> Iterator[None]:
    """Holds a lock file beside a SQLite file; does nothing for PostgreSQL.

    Raises UnsupportedDatabase, or LedgerUnavailable when another scheduler holds it or the file cannot be made.
    """
    parsed = parse_url(url)
    if parsed.get_backend_name() != "sqlite":
        yield
        return
    path = Path(f"{parsed.database}.lock")
    try:
        descriptor = take_lock(path)
    except BlockingIOError as error:
        raise LedgerUnavailable(
            "another scheduler runs on it: stop that one, or name another file; schedulers that share a database need PostgreSQL"
        ) from error
    except OSError as error:
        raise LedgerUnavailable(f"the lock file {path} cannot be made: {error.strerror}") from error
    try:
        yield
    finally:
        os.close(descriptor)
