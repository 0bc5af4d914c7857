"""`python -m tokenmill_scheduler`: the scheduler service."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence

from tokenmill_scheduler.ledger import open_ledger
from tokenmill_scheduler.logs import configure_logs
from tokenmill_scheduler.server import serve
from tokenmill_scheduler.settings import SettingsError, settings_from_process


def main(argv: Sequence[str]) -> int:
    """Runs the service; returns the exit code: 0 after a signal, 2 for an operator's mistake, 1 for a fault of its own."""
    try:
        settings = settings_from_process(argv)
        configure_logs(settings.log_format, settings.log_level)
        ledger = open_ledger(settings.database, settings.durability)
        try:
            with asyncio.Runner(loop_factory=_loop_factory()) as runner:
                return runner.run(serve(settings, ledger))
        finally:
            ledger.close()
    except SettingsError as error:
        print(f"tokenmill_scheduler: {error}", file=sys.stderr)
        return 2


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's where it is installed: an eighth to a quarter less time a message."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
