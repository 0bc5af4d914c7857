"""`tokenmill serve`: run the services."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NoReturn

import click
from tokenmill_client import Unavailable

from tokenmill_cli.app import App, pass_app
from tokenmill_cli.commands.models import pull_model
from tokenmill_cli.flags import has_flag, route
from tokenmill_cli.models import DEFAULT_MODEL, SOURCES
from tokenmill_cli.processes import Service, check_installed

SCHEDULER, EXECUTOR = "tokenmill_scheduler", "tokenmill_executor"
_PASS_THROUGH = {"ignore_unknown_options": True, "help_option_names": []}
_POLL_S = 0.2


@click.group()
def serve() -> None:
    """Run the service.

    `all` runs it on this machine; `scheduler` and `executor` are its two parts.
    """


@serve.command(context_settings=_PASS_THROUGH, add_help_option=False)
@click.argument("flags", nargs=-1, type=click.UNPROCESSED)
def scheduler(flags: tuple[str, ...]) -> NoReturn:
    """Run a scheduler; --help shows its flags."""
    _become(SCHEDULER, flags)


@serve.command(context_settings=_PASS_THROUGH, add_help_option=False)
@click.argument("flags", nargs=-1, type=click.UNPROCESSED)
def executor(flags: tuple[str, ...]) -> NoReturn:
    """Run an executor; --help shows its flags."""
    _become(EXECUTOR, flags)


def _become(module: str, flags: tuple[str, ...]) -> NoReturn:
    """This process turns into the service: signals and exit code are the service's own."""
    check_installed(module)
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", module, *flags])


@serve.command("all", context_settings={"ignore_unknown_options": True})
@click.option("--executor-listen", default="127.0.0.1:7601", show_default=True, metavar="ADDRESS", help="The executor's address.")
@click.option("--executor-metrics-address", default="", metavar="ADDRESS", help="Where Prometheus finds the executor's metrics.")
@click.argument("flags", nargs=-1, type=click.UNPROCESSED)
@pass_app
def all_(app: App, executor_listen: str, executor_metrics_address: str, flags: tuple[str, ...]) -> None:
    """Run an executor and a scheduler together, on this machine.

    FLAGS go to the one that knows them, and to both if both do: see `serve scheduler --help` and `serve executor --help`; --listen,
    --metrics-address and --tls-… are the scheduler's. Without --model it is the default model, fetched if need be. Ends when one of
    the two ends, with its exit code.
    """
    for_executor, for_scheduler = route(flags)
    if not has_flag(flags, "--model") and "TOKENMILL_MODEL" not in os.environ:
        pull_model(SOURCES[DEFAULT_MODEL])
        for_executor += ["--model", DEFAULT_MODEL]
    if not has_flag(flags, "--listen"):
        # TOKENMILL_LISTEN would be both services'.
        for_scheduler += ["--listen", "127.0.0.1:7600"]
    if (has_flag(flags, "--tls-cert") or os.environ.get("TOKENMILL_TLS_CERT")) and not app.uses_tls:
        raise click.UsageError("To see when a service with TLS is ready, name its authority: tokenmill --tls-ca FILE serve all …")
    # What the environment says of TLS is for the scheduler's clients; between the two it is not needed.
    for_executor += ["--tls-cert=", "--tls-key=", "--tls-client-ca=", "--listen", executor_listen]
    for_executor += [f"--metrics-address={executor_metrics_address}"]
    for_scheduler += ["--executor-tls-ca=", "--executor-tls-cert=", "--executor-tls-key="]
    click.get_current_context().exit(_run_pair(app, executor_listen, for_executor, for_scheduler))


def _run_pair(app: App, executor_listen: str, for_executor: Sequence[str], for_scheduler: Sequence[str]) -> int:
    """Returns the exit code of the first to fail; 0 when both end well after a signal."""
    services: list[Service] = []
    with ExitStack() as stack:
        # Left in reverse order: the scheduler stops first and says goodbye to its executor.
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tokenmill-")))

        def start(name: str, module: str, flags: Sequence[str]) -> Service:
            service = stack.enter_context(Service(name, module, flags, folder, _printer(name)))
            services.append(service)
            return service

        try:
            executor = start("executor", EXECUTOR, for_executor)
            # The scheduler comes up while the model loads, unless the system is to choose the executor's port.
            executor_address = executor.address() if executor_listen.endswith(":0") else executor_listen
            scheduler = start("scheduler", SCHEDULER, [*for_scheduler, "--executor", executor_address])
            # This one ends first when something is wrong with the model.
            executor.address()
            address = scheduler.address()
            if _wait_ready(app, address, services):
                _say_how_to_use(address)
                _wait_first_end(services)
        except KeyboardInterrupt:
            # Told to stop, by SIGINT or SIGTERM.
            pass
        ended_first = [service for service in services if service.exit_code is not None]
    codes = [service.exit_code or 0 for service in [*ended_first, *services]]
    return next((code for code in codes if code), 0)


def _wait_ready(app: App, address: str, services: Sequence[Service]) -> bool:
    """False when a service ended first."""
    with app.client(address) as client:
        while all(service.exit_code is None for service in services):
            try:
                client.wait_ready(timeout=1.0)
            except Unavailable:
                continue
            return True
    return False


def _wait_first_end(services: Sequence[Service]) -> None:
    while all(service.exit_code is None for service in services):
        time.sleep(_POLL_S)


_PRINTING = threading.Lock()


def _printer(name: str) -> Callable[[str], None]:
    """Writes a service's log lines to standard error, each with the service's name."""
    prefix = f"{name:<9} | "

    def on_line(line: str) -> None:
        with _PRINTING:
            click.echo(prefix + line, err=True)

    return on_line


def _say_how_to_use(address: str) -> None:
    """The address is left out where it is the one that all commands take by default."""
    server = "" if address == "127.0.0.1:7600" else f" --server {address}"
    with _PRINTING:
        click.echo(
            f"""
tokenmill is ready at {address}. Ctrl-C stops it. In another terminal:

  tokenmill{server} generate --chat "Why is the sky blue?" --max-tokens 100
  tokenmill{server} requests list
  tokenmill{server} load

or in Python:

  from tokenmill_client import Client

  with Client("{address}") as client:
      for delta in client.generate("Once upon a time", max_tokens=50):
          print(delta.text, end="", flush=True)
"""
        )
        sys.stdout.flush()
