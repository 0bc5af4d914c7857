"""One statement over many parameter rows, for either database.

A statement is written once, over the columns of `v`, the table of the parameters, and handed to the driver as the text that it
compiles to: SQLAlchemy's own way spends longer on a statement than the database. PostgreSQL gets that table in one round trip, each
column as the text of an array (arrays.py). SQLite has no network to save: there a column of `v` is a placeholder, and the driver
runs the statement once for each row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

from sqlalchemy import ColumnElement, Connection, Text, bindparam, cast, column, func
from sqlalchemy.sql.dml import UpdateBase
from sqlalchemy.types import TypeEngine

from tokenmill_scheduler.ledger.arrays import array_encoder
from tokenmill_scheduler.ledger.engine import driver
from tokenmill_scheduler.ledger.errors import LedgerConflict

Types = Mapping[str, TypeEngine[Any]]
Columns = Mapping[str, ColumnElement[Any]]
Build = Callable[[Columns], UpdateBase]
Row = tuple[Any, ...]


class Bulk:
    """A statement over parameter rows with columns of these types; `build` makes it from `v`, and binds nothing else."""

    def __init__(self, dialect: str, types: Types, build: Build) -> None:
        self._execute = _by_row(types, build) if dialect == "sqlite" else _by_columns(types, build)

    def run(self, connection: Connection, rows: Sequence[Row]) -> int:
        """Returns the number of rows written; `rows` hold the columns in order."""
        return self._execute(connection, rows) if rows else 0

    def run_all(self, connection: Connection, rows: Sequence[Row], what: str) -> None:
        """Raises LedgerConflict unless each parameter row wrote one row: else a guard of the statement did not hold."""
        written = self.run(connection, rows)
        if written != len(rows):
            raise LedgerConflict(f"{what}: the guard held for {written} of {len(rows)} requests")


def _by_row(types: Types, build: Build) -> Callable[[Connection, Sequence[Row]], int]:
    from sqlalchemy.dialects import sqlite

    # Other names than the columns', which are reserved in an UPDATE.
    binds = {name: bindparam(f"v_{name}", type_=type_) for name, type_ in types.items()}
    compiled = build(binds).compile(dialect=sqlite.dialect())
    statement = str(compiled)
    positions = [list(types).index(bind.removeprefix("v_")) for bind in compiled.positiontup or ()]
    # A row with one value in the order of the placeholders stays a tuple.
    arrange: Callable[[Row], Row] = itemgetter(*positions) if len(positions) > 1 else tuple
    return lambda connection, rows: driver(connection).executemany(statement, map(arrange, rows)).rowcount


def _by_columns(types: Types, build: Build) -> Callable[[Connection, Sequence[Row]], int]:
    from sqlalchemy.dialects.postgresql import ARRAY, psycopg

    arrays = (cast(bindparam(f"v_{name}", type_=Text), ARRAY(type_)) for name, type_ in types.items())
    source = func.unnest(*arrays).table_valued(*(column(name, type_) for name, type_ in types.items()), name="v")
    v = source.render_derived()
    statement = str(build(dict(v.c.items())).compile(dialect=psycopg.dialect()))  # type: ignore[no-untyped-call]
    names = [f"v_{name}" for name in types]
    encoders = [array_encoder(type_) for type_ in types.values()]

    def execute(connection: Connection, rows: Sequence[Row]) -> int:
        columns = zip(*rows, strict=True)
        parameters = {name: encode(values) for name, encode, values in zip(names, encoders, columns, strict=True)}
        return connection.exec_driver_sql(statement, parameters).rowcount

    return execute
