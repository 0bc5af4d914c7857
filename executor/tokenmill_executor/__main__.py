"""`python -m tokenmill_executor`: the executor service."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence as SequenceOf

from tokenmill_executor.address import check_address
from tokenmill_executor.logs import configure_logs
from tokenmill_executor.server import serve
from tokenmill_executor.settings import SettingsError, settings_from_process


def main(argv: SequenceOf[str]) -> int:
    """Runs the service; returns the exit code: 0 after a signal, 2 for an operator's mistake, 1 for a fault of its own."""
    try:
        settings = settings_from_process(argv)
        check_address(settings.listen)
        configure_logs(settings.log_format, settings.log_level)
        return asyncio.run(serve(settings))
    except SettingsError as error:
        print(f"tokenmill_executor: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
