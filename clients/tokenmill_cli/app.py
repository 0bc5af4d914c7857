"""What every command has at hand: where the server is, and how to show what it answers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import click
from rich.console import Console
from tokenmill_client import Client, RetryPolicy

DEFAULT_SERVER = "127.0.0.1:7600"
# A person waits: say soon that nothing answers. An accepted stream is waited for as the client does.
_RETRY = RetryPolicy(call_limit_s=1.0)

F = TypeVar("F", bound=Callable[..., Any])


@dataclass
class App:
    """Filled in by options before or after the command's name."""

    server: str = DEFAULT_SERVER
    output: str = "table"

    @property
    def json(self) -> bool:
        return self.output == "json"

    def client(self) -> Client:
        return Client(self.server, retry=_RETRY)


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


def output_options(function: F) -> F:
    """`--output` and `--json`."""
    return _OUTPUT(_JSON(function))


def server_options(function: F) -> F:
    """`--server`, `--output` and `--json`."""
    return _server(output_options(function), None)


def root_options(function: F) -> F:
    """As `server_options`, for the root alone: it looks at the environment, so that an option anywhere wins over it."""
    return _server(output_options(function), "TOKENMILL_SERVER")


def pass_app(function: Callable[..., Any]) -> Callable[..., Any]:
    """Hands the App to a command as its first argument."""

    @click.pass_context
    @functools.wraps(function)
    def with_app(context: click.Context, /, *args: Any, **kwargs: Any) -> Any:
        return function(context.ensure_object(App), *args, **kwargs)

    return with_app
