"""What a ledger raises. Must not know: rows, databases."""

from __future__ import annotations


class LedgerError(Exception):
    """Base of what a ledger raises."""


class LedgerUnavailable(LedgerError):
    """The database cannot be reached or refuses writes for now; the same write may be tried again."""


class LedgerConflict(LedgerError):
    """A guard failed: the row is not in the state that the record says, or may not move so. A bug of ours or a lost lease; never
    tried again.
    """


class LedgerCorrupt(LedgerError):
    """Stored rows contradict each other."""


class SchemaMismatch(LedgerError):
    """The database has another schema than this release; the message says which and what to run."""


class LeaseLost(LedgerConflict):
    """The lease that the write was fenced by has been taken or given up."""


class ExecutorTaken(LedgerError):
    """Another scheduler on this database drives the executor."""


class EpochsUsedUp(LedgerError):
    """An executor of this name has had MAX_EPOCH."""

    def __init__(self, executor: str) -> None:
        super().__init__(f"executor {executor} has had the highest epoch there is: give it another --name")
