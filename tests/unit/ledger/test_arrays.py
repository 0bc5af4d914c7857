"""Columns as array texts: PostgreSQL reads the same values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psycopg
import pytest
from sqlalchemy import BigInteger, Double, Integer, LargeBinary, Text
from sqlalchemy.types import TypeEngine
from tokenmill_scheduler.ledger.arrays import array_encoder

from tests.fakes.postgres import PostgresServer

ODD = ["", " ", "NULL", "null", '"', "\\", '\\"', "{", "}", ",", "a,b", "{a}", "\n", "\t", "'", "%s", ":x", "Grüße", "😀", "\\x00"]


@pytest.mark.parametrize(
    ("type_", "name", "values"),
    [
        (Text(), "text", ["plain", "words-1"]),
        *[(Text(), "text", ["plain", odd, "plain"]) for odd in ODD],
        (Text(), "text", ODD),
        # As many marks as two plain values have between them.
        (Text(), "text", ['a","b', "c"]),
        (Text(), "text", [None, *ODD, None]),
        (Text(), "text", [None]),
        (LargeBinary(), "bytea", [b"", b"\0", b"\\", b"\\x41", bytes(range(256))]),
        (LargeBinary(), "bytea", [None, b"", b"\xff"]),
        (Integer(), "int", [0, -1, 2**31 - 1, -(2**31)]),
        (Integer(), "int", [None, 1, None]),
        (BigInteger(), "bigint", [2**63 - 1, -(2**63)]),
        (Double(), "double precision", [0.1, 1e-300, -1.7976931348623157e308, 1764485486.123456, 5e-324]),
        (Double(), "double precision", [None, 0.1 + 0.2]),
    ],
)
def test_what_is_written_is_read(postgres: PostgresServer, type_: TypeEngine[Any], name: str, values: Sequence[Any]) -> None:
    with psycopg.connect(postgres.handle.get_uri(database="postgres")) as connection:
        # In UTF-8, as the ledger's own connections.
        connection.execute("SET client_encoding = 'UTF8'")
        row = connection.execute(f"SELECT CAST(%s AS {name}[])".encode(), [array_encoder(type_)(values)]).fetchone()
    assert row == (list(values),)
