"""What every command has at hand: where the server is, and how to show what it answers."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console
from tokenmill_client import AsyncClient, Client, RetryPolicy, Tls

from tokenmill_cli.exits import CommandError, ExitCode

DEFAULT_SERVER = "127.0.0.1:7600"
# A person waits: say soon that nothing answers. An accepted stream is waited for as the client does.
_RETRY = RetryPolicy(call_limit_s=1.0)

C = TypeVar("C")
F = TypeVar("F", bound=Callable[..., Any])


@dataclass
class App:
    """Filled in by options before or after the command's name."""

    server: str = DEFAULT_SERVER
    output: str = "table"
    tls: bool = False
    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    token_file: Path | None = None

    @property
    def json(self) -> bool:
        return self.output == "json"

    @property
    def uses_tls(self) -> bool:
        return self.tls or self.tls_ca is not None or self.tls_cert is not None or self.tls_key is not None

    def client(self, address: str | None = None) -> Client:
        """Of the server at hand, unless another address is given."""
        return self._connected(Client, address or self.server)

    def async_client(self) -> AsyncClient:
        """Of the server at hand, for asyncio."""
        return self._connected(AsyncClient, self.server)

    def _connected(self, kind: Callable[..., C], address: str) -> C:
        tls = Tls(self.tls_ca, self.tls_cert, self.tls_key) if self.uses_tls else None
        try:
            return kind(address, retry=_RETRY, token=self._token(), tls=tls)
        except OSError as error:
            raise CommandError(f"{error.filename} cannot be read: {error.strerror}.", ExitCode.USAGE) from error
        except ValueError as error:
            raise CommandError(str(error), ExitCode.USAGE) from error

    def _token(self) -> str | None:
        """From a file or the environment; a command line is there for all to read."""
        if self.token_file is None:
            return os.environ.get("TOKENMILL_TOKEN") or None
        return self.token_file.read_text(encoding="utf-8").strip()


def console() -> Console:
    """To standard output: colours on a terminal, plain text into a pipe."""
    screen = Console(highlight=False)
    # What goes into a pipe is for a program or a file: no line of it is cut or folded to a width that nothing has.
    return screen if screen.is_terminal else Console(highlight=False, width=1_000)


def _store(context: click.Context, parameter: click.Parameter, value: Any) -> None:
    if value is not None and value is not False:
        name, value = ("output", "json") if parameter.name == "as_json" else (parameter.name, value)
        setattr(context.ensure_object(App), str(name), value)


def _server(function: F, envvar: str | None) -> F:
    option = click.option(
        "--server", metavar="ADDRESS", envvar=envvar, expose_value=False, callback=_store, is_eager=True,
        help=f"The scheduler: HOST:PORT or unix:PATH.  [env: TOKENMILL_SERVER; default: {DEFAULT_SERVER}]",
    )  # fmt: skip
    return option(function)


_OUTPUT = click.option(
    "--output", type=click.Choice(["table", "json"]), expose_value=False, callback=_store, is_eager=True,
    help="Tables for people, or one JSON document.  [default: table]",
)  # fmt: skip
_JSON = click.option(
    "--json", "as_json", is_flag=True, expose_value=False, callback=_store, is_eager=True, help="As --output json."
)


def _file(name: str, envvar: str, words: str) -> Callable[[F], F]:
    return click.option(
        name, metavar="FILE", type=click.Path(path_type=Path), envvar=envvar, expose_value=False, callback=_store, is_eager=True,
        help=f"{words}  [env: {envvar}]",
    )  # fmt: skip


_SECURITY = (
    click.option(
        "--tls",
        is_flag=True,
        envvar="TOKENMILL_CLIENT_TLS",
        expose_value=False,
        callback=_store,
        is_eager=True,
        help="TLS to a server whose certificate a well-known authority signed.  [env: TOKENMILL_CLIENT_TLS]",
    ),
    _file("--tls-ca", "TOKENMILL_CLIENT_TLS_CA", "TLS to a server whose certificate this authority (PEM) signed."),
    _file("--tls-cert", "TOKENMILL_CLIENT_TLS_CERT", "The certificate (PEM) to show to it, for mutual TLS."),
    _file("--tls-key", "TOKENMILL_CLIENT_TLS_KEY", "The certificate's private key (PEM)."),
    _file("--token-file", "TOKENMILL_TOKEN_FILE", "A file with the token to send; without one, TOKENMILL_TOKEN."),
)


def output_options(function: F) -> F:
    """`--output` and `--json`."""
    return _OUTPUT(_JSON(function))


def server_options(function: F) -> F:
    """`--server`, `--output` and `--json`."""
    return _server(output_options(function), None)


def root_options(function: F) -> F:
    """As `server_options`, for the root alone: it looks at the environment, so that an option anywhere wins over it.

    The root alone has what rarely changes from command to command; TOKENMILL_TLS_… would be the services' own.
    """
    for option in reversed(_SECURITY):
        function = option(function)
    return _server(output_options(function), "TOKENMILL_SERVER")


def pass_app(function: Callable[..., Any]) -> Callable[..., Any]:
    """Hands the App to a command as its first argument."""

    @click.pass_context
    @functools.wraps(function)
    def with_app(context: click.Context, /, *args: Any, **kwargs: Any) -> Any:
        return function(context.ensure_object(App), *args, **kwargs)

    return with_app
