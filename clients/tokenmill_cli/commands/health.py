"""`tokenmill health`: for the health checks of containers and supervisors."""

from __future__ import annotations

import click

from tokenmill_cli.app import App, pass_app, server_options
from tokenmill_cli.exits import CommandError, ExitCode
from tokenmill_cli.output import print_json


@click.command()
@click.argument("address", required=False)
@click.option("--service", default="", help="Ask of this service, such as tokenmill.liveness.  [default: the whole server]")
@server_options
@pass_app
def health(app: App, address: str | None, service: str) -> None:
    """Whether a scheduler or an executor is ready.

    The one at ADDRESS, or the scheduler at hand. Exits with 0 if it is, with 4 if it is not.
    """
    with app.client(address) as client:
        serving = client.is_serving(service)
        where = client.address
    if app.json:
        print_json({"address": where, "service": service, "serving": serving})
    elif serving:
        click.echo(f"{where} is ready.")
    if not serving:
        raise CommandError(f"{service or 'The server'} at {where} is not ready.", ExitCode.UNAVAILABLE)
