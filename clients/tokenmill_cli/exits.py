"""Exit codes, and the one table from the client's errors to them. Shown in the README and by `tokenmill --help`."""

from __future__ import annotations

from enum import IntEnum

import click
from tokenmill_client import errors


class ExitCode(IntEnum):
    OK = 0
    # The command failed, or the request it followed did not end well.
    FAILURE = 1
    # The command line is wrong.
    USAGE = 2
    NOT_FOUND = 3
    # Nothing answers, or the server is not ready; the same command may succeed later.
    UNAVAILABLE = 4
    # The server refused: the request is not valid, or not now possible.
    REFUSED = 5
    INTERRUPTED = 130


class CommandError(click.ClickException):
    """What went wrong, in a sentence that says what to do. `exit_code` is an ExitCode, or that of a child process."""

    def __init__(self, message: str, exit_code: int = ExitCode.FAILURE) -> None:
        super().__init__(message)
        self.code = exit_code


_BY_ERROR: dict[type[errors.TokenmillError], ExitCode] = {
    errors.InvalidRequest: ExitCode.REFUSED,
    errors.AlreadyExists: ExitCode.REFUSED,
    errors.AlreadyEnded: ExitCode.REFUSED,
    errors.ResourceExhausted: ExitCode.REFUSED,
    errors.Unauthenticated: ExitCode.REFUSED,
    errors.PermissionDenied: ExitCode.REFUSED,
    errors.NotFound: ExitCode.NOT_FOUND,
    errors.Unavailable: ExitCode.UNAVAILABLE,
    errors.DeadlineExceeded: ExitCode.UNAVAILABLE,
}


def command_error(error: errors.TokenmillError) -> CommandError:
    code = next((code for kind, code in _BY_ERROR.items() if isinstance(error, kind)), ExitCode.FAILURE)
    return CommandError(_sentence(error), code)


def _sentence(error: errors.TokenmillError) -> str:
    text = str(error)
    if isinstance(error, errors.QueueFull):
        return f"{text} Try again in {error.retry_delay_s:g} s."
    if isinstance(error, errors.Unauthenticated):
        return f"{text}. Give it with --token-file or TOKENMILL_TOKEN."
    if isinstance(error, errors.NoSecureConnection):
        return f"{text} See --tls-ca, --tls-cert and --tls-key."
    if isinstance(error, errors.Unavailable) and error.retry_delay_s is not None:
        # The server's own words: it runs, and cannot do it now.
        return f"{text.rstrip('.')}: try again in {error.retry_delay_s:g} s."
    if error.code == "UNIMPLEMENTED":
        return "The server does not know this call: name a scheduler of this release with --server, not an executor."
    if isinstance(error, errors.Unavailable):
        return f"{text} Start it with `tokenmill serve all`, or name another with --server."
    return text
