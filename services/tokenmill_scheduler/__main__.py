"""`python -m tokenmill_scheduler`: the scheduler service."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager

import structlog
from tokenmill_service.event_loop import new_runner
from tokenmill_service.flags import SettingsError
from tokenmill_service.logs import configure_logs

from tokenmill_scheduler.ledger.errors import LedgerError
from tokenmill_scheduler.ledger.lock import database_lock
from tokenmill_scheduler.ledger.sql import SqlLedger, open_ledger
from tokenmill_scheduler.process import serve
from tokenmill_scheduler.settings import Settings, settings_from_process

log = structlog.get_logger(__name__)


def main(argv: Sequence[str]) -> int:
    """Runs the service; returns the exit code: 0 after a signal, 2 for an operator's mistake, 1 for a fault of its own."""
    try:
        settings = settings_from_process(argv)
        configure_logs(settings.log_format, settings.log_level)
        # Not for people: of a start that fails they see its one sentence alone.
        log.debug("starting")
        with _open(settings) as ledger, new_runner() as runner:
            return runner.run(serve(settings, ledger))
    except SettingsError as error:
        print(f"tokenmill_scheduler: {error}", file=sys.stderr)
        return 2


@contextmanager
def _open(settings: Settings) -> Iterator[SqlLedger]:
    """Raises SettingsError."""
    with ExitStack() as stack:
        try:
            stack.enter_context(database_lock(settings.database))
            # A transaction that stands still has ended by the time that the lease has run out.
            ledger = open_ledger(settings.database, durable=settings.durability == "power", stall_timeout_s=settings.lease_time_s)
        except (LedgerError, ValueError) as error:
            raise SettingsError(f"--database cannot be used: {error}") from error
        yield stack.enter_context(closing(ledger))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
