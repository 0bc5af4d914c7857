"""`tokenmill`: the command line. Commands are imported when they are used, so that each starts as fast as it can."""

from __future__ import annotations

import importlib
import io
import signal
import sys
from collections.abc import Sequence

import click

# Ahead of grpc, which reads then how it is to wait for its sockets.
from tokenmill_service import event_loop  # noqa: F401

from tokenmill_cli.app import root_options
from tokenmill_cli.exits import CommandError, ExitCode, command_error

_COMMANDS = (
    "serve", "generate", "requests", "executors", "queue", "policy", "actions", "load", "top", "health", "models", "db", "auth",
    "bench", "demo", "simulate", "replay", "completion",
)  # fmt: skip


class _LazyGroup(click.Group):
    """Each command is the object of its name in the module of its name under `commands/`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = getattr(importlib.import_module(f"tokenmill_cli.commands.{cmd_name}"), cmd_name)
        return command


_EPILOG = """\
\b
Exit codes: 0 done, 1 failed, 2 wrong command line, 3 not found, 4 nothing
answers or not ready, 5 refused by the server, 130 interrupted."""


@click.group(cls=_LazyGroup, epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="tokenmill")
@root_options
def cli() -> None:
    """Run tokenmill, use it, and operate it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; an error is one sentence on standard error."""
    # A model writes what it likes; a terminal that cannot show a character shows another.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    from tokenmill_client import TokenmillError

    before = signal.signal(signal.SIGTERM, _terminated)
    try:
        try:
            result = cli.main(args=argv, prog_name="tokenmill", standalone_mode=False)
        except TokenmillError as error:
            raise command_error(error) from error
    except click.ClickException as error:
        error.show()
        return error.code if isinstance(error, CommandError) else error.exit_code
    except click.Abort:
        return ExitCode.INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, before)
    return result if isinstance(result, int) else ExitCode.OK


def _terminated(number: int, frame: object) -> None:
    """As Ctrl-C does, so that what was started is stopped. What a script starts with `&` ignores Ctrl-C, but not this."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        raise KeyboardInterrupt
    signal.raise_signal(signal.SIGINT)


if __name__ == "__main__":
    sys.exit(main())
