"""What the errors of the drivers of SQLite and PostgreSQL mean to the ledger's users. Must not know: tables, connections."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy.exc import DBAPIError, IntegrityError, InterfaceError, InternalError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from tokenmill_scheduler.ledger.errors import LedgerConflict, LedgerUnavailable

# SQLite's primary result codes that pass with time, or when an operator makes room or mends permissions.
_PASSING_SQLITE_CODES = frozenset(
    {
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_NOMEM,
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_PROTOCOL,
    }
)
# A database that takes no writes for now; a transaction that stood still for too long, as its process did.
_PASSING_INTERNAL_STATES = frozenset({"25006", "25P03"})


@contextmanager
def driver_errors() -> Iterator[None]:
    """Turns what passes with time into LedgerUnavailable and a refused constraint into LedgerConflict.

    Every other error of the driver is a bug and goes on as it is. SQLite's come bare from what runs on `engine.driver`.
    """
    try:
        yield
    except (IntegrityError, sqlite3.IntegrityError) as error:
        raise LedgerConflict(_first_line(_original(error))) from error
    except (DBAPIError, sqlite3.Error) as error:
        if not is_passing(error):
            raise
        raise LedgerUnavailable(_first_line(_original(error))) from error
    except PoolTimeout as error:
        raise LedgerUnavailable(_first_line(error)) from error


def is_passing(error: DBAPIError | sqlite3.Error) -> bool:
    """Whether the same statement may succeed later."""
    if isinstance(error, DBAPIError) and error.connection_invalidated:
        return True
    original = _original(error)
    if isinstance(original, sqlite3.Error):
        # Extended codes carry the primary one in their low byte.
        return getattr(original, "sqlite_errorcode", 0) & 0xFF in _PASSING_SQLITE_CODES
    if isinstance(error, InternalError):
        return getattr(original, "sqlstate", None) in _PASSING_INTERNAL_STATES
    return isinstance(error, OperationalError | InterfaceError)


def _original(error: DBAPIError | sqlite3.Error) -> BaseException | None:
    return error.orig if isinstance(error, DBAPIError) else error


def _first_line(error: BaseException | None) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
