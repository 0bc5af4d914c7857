"""The schema's migrations from Python: where they are, what a database has, how to get from one to the other.

All but `prepare` take a database URL and raise UnsupportedDatabase or LedgerUnavailable. `upgrade` and `downgrade` raise
SchemaMismatch for a later release's or another program's. Alembic is imported once something is to be migrated: to find that
nothing is must not cost every start of a scheduler a tenth of a second.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import Connection, Engine, inspect, text

from tokenmill_scheduler.ledger import leases
from tokenmill_scheduler.ledger.driver_errors import driver_errors
from tokenmill_scheduler.ledger.engine import connect, parse_url
from tokenmill_scheduler.ledger.errors import LedgerUnavailable, SchemaMismatch
from tokenmill_scheduler.ledger.lock import database_lock
from tokenmill_scheduler.ledger.tables import metadata

if TYPE_CHECKING:
    from alembic.config import Config

# Held while migrating a PostgreSQL database, so that two schedulers that start together do not both create the tables.
_ADVISORY_LOCK = 7_600_760_001
# Alembic's own.
_VERSION_TABLE = "alembic_version"


class SchemaState(StrEnum):
    EMPTY = "empty"
    CURRENT = "current"
    OLDER = "older"
    # Written by another, later release: a revision that this one does not know.
    NEWER = "newer"


def migrations_folder() -> Path:
    """In an installed wheel beside this module, in a checkout at its root."""
    here = Path(__file__).resolve()
    installed = here.parent / "_migrations"
    return installed if installed.is_dir() else here.parents[3] / "migrations"


def head() -> str:
    """The revision of this release."""
    return _revisions()[-1]


def _revisions() -> list[str]:
    """From the first to the newest: a revision's file begins with its number."""
    return sorted(file.name.partition("_")[0] for file in (migrations_folder() / "versions").glob("[0-9]*_*.py"))


def current(url: str) -> str | None:
    """The revision that the database has; None when it has no tables of ours. A question makes no file."""
    parsed = parse_url(url)
    if parsed.get_backend_name() == "sqlite" and not Path(str(parsed.database)).exists():
        return None
    engines = connect(url)
    try:
        with driver_errors(), engines.read.connect() as connection:
            return _revision(connection)
    finally:
        engines.dispose()


def check(url: str) -> SchemaState:
    """How the database's schema stands to this release."""
    return _state(current(url))


def upgrade(url: str, revision: str = "head") -> None:
    """All or nothing: an interrupted upgrade leaves the database as it was."""
    _migrate(url, lambda config: _upgrade(config, revision))


def downgrade(url: str, revision: str) -> None:
    """To an older revision, or to `base`, which drops every table."""
    from alembic import command

    _migrate(url, lambda config: command.downgrade(config, revision))


def _upgrade(config: Config, revision: str) -> None:
    from alembic import command

    command.upgrade(config, revision)


def prepare(engine: Engine, *, create: bool) -> None:
    """Makes the tables of an empty database if `create`. Raises SchemaMismatch unless the schema is this release's."""
    with driver_errors(), engine.connect() as connection:
        revision = _revision(connection)
    if revision is None and create:
        _run(engine, lambda config: _upgrade(config, "head"))
        return
    match _state(revision):
        case SchemaState.EMPTY:
            raise SchemaMismatch("the database has no tables yet: run `tokenmill db upgrade`")
        case SchemaState.OLDER:
            raise SchemaMismatch(
                f"the database has schema {revision}, older than this release's {head()}: stop every scheduler on it, back it up, "
                "and run `tokenmill db upgrade`"
            )
        case SchemaState.NEWER:
            raise _too_new(revision)
        case SchemaState.CURRENT:
            return


def _too_new(revision: str | None) -> SchemaMismatch:
    return SchemaMismatch(
        f"the database has schema {revision}, which this release (schema {head()}) does not know: start the release that "
        f"wrote it, or with that release run `tokenmill db downgrade {head()}`"
    )


def _revision(connection: Connection) -> str | None:
    if not inspect(connection).has_table(_VERSION_TABLE):
        return None
    revision: str | None = connection.scalar(text(f"SELECT version_num FROM {_VERSION_TABLE}"))
    return revision


def _state(revision: str | None) -> SchemaState:
    if revision is None:
        return SchemaState.EMPTY
    if revision not in _revisions():
        return SchemaState.NEWER
    return SchemaState.CURRENT if revision == head() else SchemaState.OLDER


def _migrate(url: str, step: Callable[[Config], None]) -> None:
    """Refuses, as LedgerUnavailable, while a scheduler runs on the database: its tables would change under it.

    Also, as SchemaMismatch, what a later release has made of it: only that one knows the way back.
    """
    with database_lock(url):
        engines = connect(url)
        try:
            with driver_errors(), engines.read.connect() as connection:
                _refuse_if_newer(connection)
                _refuse_if_used(connection)
            _run(engines.write, step)
        finally:
            engines.dispose()


def _refuse_if_newer(connection: Connection) -> None:
    revision = _revision(connection)
    if _state(revision) is SchemaState.NEWER:
        raise _too_new(revision)


def _refuse_if_foreign(connection: Connection) -> None:
    """Tables of our names in a database that has no revision are somebody else's."""
    foreign = metadata.tables.keys() & inspect(connection).get_table_names()
    if foreign and _revision(connection) is None:
        raise SchemaMismatch(
            f"the database is another program's, with tables of its own ({', '.join(sorted(foreign))}): name another database"
        )


def _refuse_if_used(connection: Connection) -> None:
    """By the leases, which an old release's schema may not have; a SQLite file is guarded by its lock alone."""
    if connection.dialect.name == "sqlite" or not _has_leases(connection):
        return
    alive = [status.lease.scheduler for status in leases.statuses(connection) if not status.expired]
    if alive:
        raise LedgerUnavailable(f"it is in use by {', '.join(alive)}: stop every scheduler on it first")


def _has_leases(connection: Connection) -> bool:
    """As schemas have them since the second."""
    tables = inspect(connection)
    return tables.has_table("leases") and any(column["name"] == "number" for column in tables.get_columns("leases"))


def _run(engine: Engine, step: Callable[[Config], None]) -> None:
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(migrations_folder()).replace("%", "%%"))
    with driver_errors(), engine.begin() as connection:
        if connection.dialect.name == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _ADVISORY_LOCK})
        _refuse_if_foreign(connection)
        config.attributes["connection"] = connection
        step(config)
