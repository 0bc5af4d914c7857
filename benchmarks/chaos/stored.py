"""Reads what the database holds, by statements of its own: the ledger's reads are among what is judged."""

from __future__ import annotations

import struct
from collections import defaultdict

from sqlalchemy import Connection, create_engine, func, select
from tokenmill_scheduler.core.request import TERMINAL
from tokenmill_scheduler.ledger.tables import requests, tails, tokens, transitions

from benchmarks.chaos.audit import Move, Stored


def read_stored(url: str) -> dict[str, Stored]:
    """By request id."""
    engine = create_engine(url)
    try:
        with engine.connect() as connection:
            moves, output = _moves(connection), _output(connection)
            rows = connection.execute(select(requests.c.request_id, requests.c.state, requests.c.num_output_tokens))
            return {id_: Stored(state, count, tuple(moves[id_]), output[id_]) for id_, state, count in rows}
    finally:
        engine.dispose()


def count_unfinished(url: str) -> int:
    engine = create_engine(url)
    try:
        with engine.connect() as connection:
            unfinished = select(func.count()).where(requests.c.state.not_in([state.value for state in TERMINAL]))
            return connection.execute(unfinished).scalar_one()
    finally:
        engine.dispose()


def _moves(connection: Connection) -> dict[str, list[Move]]:
    moves: dict[str, list[Move]] = defaultdict(list)
    columns = (transitions.c.request_id, transitions.c.before_state, transitions.c.after_state, transitions.c.reason)
    for request_id, before, after, reason in connection.execute(select(*columns).order_by(transitions.c.number)):
        moves[request_id].append(Move(before, after, reason))
    return moves


def _output(connection: Connection) -> dict[str, dict[int, list[int]]]:
    """By request id and index; a list, so that an index stored twice shows."""
    output: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for table in (tokens, tails):
        for request_id, first, blob in connection.execute(select(table.c.request_id, table.c.first_index, table.c.token_ids)):
            for offset, token_id in enumerate(struct.unpack(f"<{len(blob) // 4}I", blob)):
                output[request_id][first + offset].append(token_id)
    return output
