"""One statement over many parameter rows, for either database.

A statement is written once, over a table expression `v` of the parameters. PostgreSQL gets them as one array for each column and
unnests the arrays: one round trip, measured 1.6 times as fast as psycopg's executemany. SQLite has no arrays; there `v` is one row
and the statement runs once for each, inside the driver.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, FromClause, bindparam, cast, column, func, select
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.sql.base import Executable
from sqlalchemy.types import TypeEngine

from tokenmill_scheduler.ledger.port import LedgerConflict

Columns = Mapping[str, TypeEngine[Any]]


def _bind_name(name: str) -> str:
    """Names that are columns of the target too are reserved in an UPDATE."""
    return f"v_{name}"


def _array_source(columns: Columns) -> FromClause:
    arrays = [cast(bindparam(_bind_name(name)), ARRAY(type_)) for name, type_ in columns.items()]
    return func.unnest(*arrays).table_valued(*(column(name, type_) for name, type_ in columns.items()), name="v").render_derived()


def _row_source(columns: Columns) -> FromClause:
    return select(*(bindparam(_bind_name(name), type_=type_).label(name) for name, type_ in columns.items())).subquery("v")


class Bulk:
    """A statement over parameter rows with these columns; `build` makes it from `v`."""

    def __init__(self, dialect: str, columns: Columns, build: Callable[[FromClause], Executable]) -> None:
        self._names = tuple(_bind_name(name) for name in columns)
        self._arrays = dialect == "postgresql"
        source = _array_source(columns) if self._arrays else _row_source(columns)
        self._statement = build(source).execution_options(preserve_rowcount=True)

    def run(self, connection: Connection, rows: Sequence[tuple[Any, ...]]) -> int:
        """Returns the number of rows written; `rows` hold the columns in order."""
        if not rows:
            return 0
        if self._arrays:
            parameters: Any = dict(zip(self._names, map(list, zip(*rows, strict=True)), strict=True))
        else:
            parameters = [dict(zip(self._names, row, strict=True)) for row in rows]
        return connection.execute(self._statement, parameters).rowcount

    def run_all(self, connection: Connection, rows: Sequence[tuple[Any, ...]], what: str) -> None:
        """Raises LedgerConflict unless each parameter row wrote one row: else a guard of the statement did not hold."""
        written = self.run(connection, rows)
        if written != len(rows):
            raise LedgerConflict(f"{what}: the guard held for {written} of {len(rows)} requests")
