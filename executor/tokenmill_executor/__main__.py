"""`python -m tokenmill_executor`: the executor service."""

from __future__ import annotations

import sys
from collections.abc import Sequence as SequenceOf

from tokenmill_service.event_loop import new_runner
from tokenmill_service.flags import SettingsError
from tokenmill_service.logs import configure_logs

from tokenmill_executor.server import serve
from tokenmill_executor.settings import settings_from_process


def main(argv: SequenceOf[str]) -> int:
    """Runs the service; returns the exit code: 0 after a signal, 2 for an operator's mistake, 1 for a fault of its own."""
    try:
        settings = settings_from_process(argv)
        configure_logs(settings.log_format, settings.log_level)
        with new_runner() as runner:
            return runner.run(serve(settings))
    except SettingsError as error:
        print(f"tokenmill_executor: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
