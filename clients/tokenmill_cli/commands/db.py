"""`tokenmill db`: the schema of the scheduler's database."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar

import click

from tokenmill_cli.app import App, output_options, pass_app
from tokenmill_cli.exits import CommandError, ExitCode
from tokenmill_cli.output import print_json

DEFAULT_DATABASE = "sqlite:///tokenmill.db"

F = TypeVar("F", bound=Callable[..., Any])


def _database_option(function: F) -> F:
    option = click.option(
        "--database", metavar="URL", envvar="TOKENMILL_DATABASE", show_envvar=True, default=DEFAULT_DATABASE, show_default=True
    )
    return option(function)


@click.group()
def db() -> None:
    """The schema of the scheduler's database.

    Before a change stop every scheduler on it, and back it up.
    """


@db.command()
@click.argument("revision", default="head")
@_database_option
def upgrade(database: str, revision: str) -> None:
    """To REVISION, or to this release's."""
    _run(lambda migrate: migrate.upgrade(database, revision))


@db.command()
@click.argument("revision")
@_database_option
@click.confirmation_option("-y", "--yes", prompt="A downgrade can drop tables and columns with all they hold. Go on?")
def downgrade(database: str, revision: str) -> None:
    """To an older REVISION; `base` drops every table."""
    _run(lambda migrate: migrate.downgrade(database, revision))


@db.command()
@_database_option
@output_options
@pass_app
def current(app: App, database: str) -> None:
    """The revision that the database has."""
    revision, head = _run(lambda migrate: (migrate.current(database), migrate.head()))
    if app.json:
        print_json({"current": revision, "head": head})
    else:
        click.echo(f"{revision or 'empty'} (this release: {head})")


@db.command()
@_database_option
@output_options
@pass_app
def check(app: App, database: str) -> None:
    """Whether the database has this release's schema; exit code 1 if not."""
    state = str(_run(lambda migrate: migrate.check(database)))
    if app.json:
        print_json({"state": state})
    else:
        click.echo(state)
    if state != "current":
        hint = "run `tokenmill db upgrade`" if state in ("empty", "older") else "use the release that wrote it"
        raise CommandError(f"The schema is {state}: {hint}.", ExitCode.FAILURE)


def _run(action: Callable[[ModuleType], Any]) -> Any:
    try:
        from alembic.util import CommandError as AlembicError
        from tokenmill_scheduler.ledger import migrate
        from tokenmill_scheduler.ledger.engine import UnsupportedDatabase
        from tokenmill_scheduler.ledger.errors import LedgerError
    except ImportError as error:
        raise CommandError(
            f"The database needs the scheduler's packages ({error.name} is missing): pip install 'tokenmill[scheduler]'."
        ) from error
    try:
        return action(migrate)
    except (LedgerError, UnsupportedDatabase, AlembicError) as error:
        raise CommandError(f"{error}") from error
