"""What only a database can show: outages, lost commits, damage, views, what stays after a restart."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from psycopg import sql
from sqlalchemy import event, text
from sqlalchemy.exc import OperationalError
from tokenmill_scheduler.core.request import State
from tokenmill_scheduler.ledger import commits
from tokenmill_scheduler.ledger.engine import CHECKPOINT_PAGES, connect
from tokenmill_scheduler.ledger.errors import LeaseLost, LedgerConflict, LedgerCorrupt, LedgerUnavailable
from tokenmill_scheduler.ledger.records import Outcome, Record
from tokenmill_scheduler.ledger.sql import SqlLedger, open_ledger
from tokenmill_scheduler.ledger.store import TAIL_TOKENS, first_move

from tests.fakes.ledger_records import done, prefill, run_to_decode, run_to_end, submission, tokens
from tests.fakes.postgres import PostgresServer, postgres_server


def rows(ledger: SqlLedger, statement: str) -> list[dict[str, object]]:
    with ledger._engines.read.connect() as connection:
        return [dict(row) for row in connection.execute(text(statement)).mappings()]


def execute(ledger: SqlLedger, statement: str) -> None:
    with ledger._engines.write.begin() as connection:
        connection.execute(text(statement))


def test_a_tail_moves_when_it_is_long_and_when_its_request_ends(sql_ledger: SqlLedger) -> None:
    run_to_decode(sql_ledger)
    first = first_move("a", TAIL_TOKENS)
    for index in range(first + TAIL_TOKENS + 5):
        sql_ledger.write([tokens("a", index, index)])
    assert rows(sql_ledger, "SELECT first_index, count FROM tokens ORDER BY first_index") == [
        {"first_index": 0, "count": first},
        {"first_index": first, "count": TAIL_TOKENS},
    ]
    assert rows(sql_ledger, "SELECT first_index, count FROM tails") == [{"first_index": first + TAIL_TOKENS, "count": 5}]
    sql_ledger.write([done()])
    assert len(rows(sql_ledger, "SELECT * FROM tokens")) == 3
    assert rows(sql_ledger, "SELECT * FROM tails") == []


def test_tails_of_requests_that_began_together_move_apart() -> None:
    moves = Counter(first_move(f"request-{number}", TAIL_TOKENS) for number in range(256))
    assert max(moves) == TAIL_TOKENS
    assert len(moves) == TAIL_TOKENS
    assert max(moves.values()) < 3 * 256 / len(moves)


def test_damage_is_found_when_it_is_read(sql_ledger: SqlLedger) -> None:
    run_to_decode(sql_ledger)
    second = first_move("a", TAIL_TOKENS)
    for index in range(second + 2 * TAIL_TOKENS):
        sql_ledger.write([tokens("a", index, index)])
    execute(sql_ledger, f"DELETE FROM tokens WHERE first_index = {second}")
    with pytest.raises(LedgerCorrupt):
        sql_ledger.output("a")
    with pytest.raises(LedgerCorrupt):
        list(sql_ledger.unfinished())
    assert len(sql_ledger.output("a", second + TAIL_TOKENS).token_ids) == TAIL_TOKENS
    execute(sql_ledger, "UPDATE tokens SET count = 3 WHERE first_index = 0")
    with pytest.raises(LedgerCorrupt):
        sql_ledger.output("a")


def test_a_nul_in_words_for_people_is_shown_as_unknown(sql_ledger: SqlLedger) -> None:
    """PostgreSQL cannot store one; a client's reason must not stop the writer."""
    run_to_decode(sql_ledger)
    sql_ledger.write([replace(done(), reason="why\0", error="because\0")])
    stored = sql_ledger.find("a")
    assert stored is not None
    assert (stored.error, sql_ledger.transitions("a")[-1].reason) == ("because\ufffd", "why\ufffd")


def test_pruning_leaves_no_rows_behind(sql_ledger: SqlLedger) -> None:
    for number in range(3):
        run_to_end(sql_ledger, f"r{number}")
    assert sql_ledger.prune(1000.0, limit=10) == 3
    for table in ("requests", "transitions", "tokens", "tails"):
        assert rows(sql_ledger, f"SELECT * FROM {table}") == []


def test_the_views_tell_an_operator(sql_ledger: SqlLedger) -> None:
    run_to_end(sql_ledger, "ended")
    sql_ledger.write([submission("w1", priority=2, tenant="t", arrival_s=50.0), submission("w2", priority=2, tenant="t")])
    (overview,) = rows(sql_ledger, "SELECT * FROM request_overview WHERE request_id = 'ended'")
    assert (overview["state"], overview["num_output_tokens"], overview["age_s"]) == ("done", 3, 10.0)
    assert overview["time_to_first_token_s"] == 3.0
    assert str(overview["finished_at"]).startswith("1970-01-01 00:01:50")
    (queue,) = rows(sql_ledger, "SELECT * FROM queue_overview")
    assert (queue["tenant"], queue["priority"], queue["state"], queue["requests"]) == ("t", 2, "waiting", 2)
    assert (overview["lane"], overview["retry_of"], queue["lane"]) == ("standard", "", "standard")
    assert isinstance(queue["oldest_age_s"], float)
    assert queue["oldest_age_s"] > 1e9
    times = rows(sql_ledger, "SELECT state, times, duration_s FROM time_in_state WHERE request_id = 'ended' ORDER BY state")
    assert times == [
        {"state": "decode", "times": 1, "duration_s": 8.0},
        {"state": "prefill", "times": 1, "duration_s": 1.0},
        {"state": "waiting", "times": 1, "duration_s": 1.0},
    ]
    assert len(rows(sql_ledger, "SELECT * FROM state_times WHERE request_id = 'ended'")) == 4


def test_all_is_there_after_a_restart(url: str) -> None:
    ledger = open_ledger(url)
    run_to_decode(ledger)
    ledger.write([tokens("a", 0, 5, 6)])
    lease = ledger.take_lease("s1", 3600)
    ledger.claim_executor(lease, "x0", "here", inherited=False, at_least=0)
    before = ledger.find("a")
    ledger.close()
    again = open_ledger(url)
    assert again.find("a") == before
    assert [(stored.state, output.token_ids) for stored, output in again.unfinished()] == [(State.DECODE, (5, 6))]
    assert again.claim_executor(lease, "x0", "here", inherited=False, at_least=0) == 2
    again.close()


# ---- two schedulers ----


def test_two_schedulers_move_one_request_once(url: str) -> None:
    mine, theirs = open_ledger(url), open_ledger(url)
    mine.write([submission()])
    theirs.write([prefill()])
    with pytest.raises(LedgerConflict):
        mine.write([prefill()])
    assert theirs.write([submission()]) == [Outcome.JOINED]
    mine.close()
    theirs.close()


# ---- outages ----


def test_a_locked_sqlite_file_is_unavailable(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenmill_scheduler.ledger.engine.BUSY_TIMEOUT_S", 0.01)
    ledger = open_ledger(sqlite_url)
    holder = sqlite3.connect(sqlite_url.removeprefix("sqlite:///"), isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    with pytest.raises(LedgerUnavailable, match="locked"):
        ledger.write([submission()])
    # Reading goes on.
    assert ledger.find("a") is None
    holder.execute("ROLLBACK")
    holder.close()
    assert ledger.write([submission()]) == [Outcome.WRITTEN]
    ledger.close()


def test_writes_keep_a_connection_until_one_fails(sqlite_url: str) -> None:
    ledger = open_ledger(sqlite_url)
    taken: list[object] = []
    event.listen(ledger._engines.write, "checkout", lambda connection, record, proxy: taken.append(connection))
    for name in "ab":
        ledger.write([submission(name)])
    assert len(taken) == 1
    with pytest.raises(LedgerConflict):
        ledger.write([prefill("nobody")])
    ledger.write([submission("c")])
    assert len(taken) == 2
    ledger.close()


def test_a_full_disk_is_unavailable(sqlite_url: str) -> None:
    ledger = open_ledger(sqlite_url)
    engine = ledger._engines.write
    with engine.connect() as connection:
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
        connection.exec_driver_sql(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(LedgerUnavailable, match="full"):
        ledger.write([submission(prompt=tuple(range(100_000)))])
    with engine.connect() as connection:
        connection.exec_driver_sql("PRAGMA max_page_count = 1000000")
    assert ledger.write([submission(prompt=tuple(range(100_000)))]) == [Outcome.WRITTEN]
    ledger.close()


def test_a_removed_sqlite_file_is_unavailable_until_it_is_back(sqlite_url: str, tmp_path: Path) -> None:
    """SQLite itself would go on writing to a file that nobody will ever find."""
    file, elsewhere = Path(sqlite_url.removeprefix("sqlite:///")), tmp_path / "elsewhere.db"
    ledger = open_ledger(sqlite_url)
    ledger.write([submission()])
    lease = ledger.take_lease("s", 10.0)
    for words in ("No such file or directory: put it back", "is another file than it was: put that one back"):
        file.rename(elsewhere)
        if "another" in words:
            file.write_bytes(b"")
        for use in (
            lambda: ledger.write([submission("b")]),
            lambda: ledger.find("a"),
            lambda: ledger.give_up_lease(lease),
        ):
            with pytest.raises(LedgerUnavailable, match=words):
                use()
        elsewhere.rename(file)
        assert ledger.find("a") is not None
    ledger.write([submission("b")])
    ledger.close()
    again = open_ledger(sqlite_url)
    assert again.find("b") is not None
    again.close()


def test_a_read_only_database_is_unavailable(sql_ledger: SqlLedger) -> None:
    make_read_only = {"sqlite": "PRAGMA query_only = {}", "postgresql": "SET default_transaction_read_only = {}"}
    statement = make_read_only[sql_ledger._engines.dialect]

    def set_read_only(value: str) -> None:
        connection = sql_ledger._engines.write.raw_connection()
        connection.driver_connection.execute(statement.format(value))  # type: ignore[union-attr]
        connection.commit()
        connection.close()

    set_read_only("on")
    with pytest.raises(LedgerUnavailable):
        sql_ledger.write([submission()])
    set_read_only("off")
    assert sql_ledger.write([submission()]) == [Outcome.WRITTEN]


def test_a_bug_of_ours_is_no_outage(sql_ledger: SqlLedger) -> None:
    execute(sql_ledger, "ALTER TABLE tails RENAME TO elsewhere")
    try:
        with pytest.raises(Exception, match="tails") as raised:
            sql_ledger.find("a")
        assert not isinstance(raised.value, LedgerUnavailable)
        assert "[SQL parameters hidden" in str(raised.value)
    finally:
        execute(sql_ledger, "ALTER TABLE elsewhere RENAME TO tails")


def test_a_database_without_an_encoding_of_its_own_keeps_text(postgres: PostgresServer) -> None:
    """As initdb makes it in the C locale."""
    postgres.execute(sql.SQL("CREATE DATABASE no_encoding TEMPLATE template0 ENCODING 'SQL_ASCII' LOCALE 'C'"))
    ledger = open_ledger(postgres.url("no_encoding"))
    stored = replace(submission(), request=replace(submission().request, stop=("größer 日本",)))
    ledger.write([stored])
    found = ledger.find("a")
    assert found is not None
    assert found.request.stop == ("größer 日本",)
    ledger.close()
    postgres.drop_database("no_encoding")


def test_a_broken_connection_is_unavailable_once(postgres: PostgresServer, postgres_url: str) -> None:
    ledger = open_ledger(postgres_url)
    ledger.write([submission()])
    break_connections(postgres_url)
    # A reader gets a new connection without noticing.
    assert ledger.find("a") is not None
    with pytest.raises(LedgerUnavailable):
        ledger.write([prefill()])
    assert ledger.write([prefill()]) == [Outcome.WRITTEN]
    ledger.close()


def break_connections(url: str) -> None:
    engines = connect(url)
    others = "FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    with engines.write.begin() as connection:
        connection.execute(text(f"SELECT pg_terminate_backend(pid, 30000) {others}")).all()
    engines.dispose()


@contextmanager
def answer_of_commit_lost(ledger: SqlLedger, *, carried_out: bool) -> Iterator[None]:
    """The next commits end in a broken connection, after or before the server has carried them out."""

    def lose(connection: object) -> None:
        raw = connection.connection.driver_connection  # type: ignore[attr-defined]
        if carried_out:
            raw.commit()
        else:
            raw.rollback()
        raise OperationalError("COMMIT", None, Exception("the connection broke"))

    event.listen(ledger._engines.write, "commit", lose)
    try:
        yield
    finally:
        event.remove(ledger._engines.write, "commit", lose)


@pytest.mark.parametrize("carried_out", [True, False])
def test_a_commit_whose_answer_is_lost_happens_once(postgres_url: str, carried_out: bool) -> None:
    ledger = open_ledger(postgres_url)
    lease = ledger.take_lease("s", 60.0)
    run_to_decode(ledger)
    batch: list[Record] = [submission("new"), submission("a"), tokens("a", 0, 5)]
    with answer_of_commit_lost(ledger, carried_out=carried_out), pytest.raises(LedgerUnavailable):
        ledger.write(batch, lease)
    assert (ledger.find("new") is not None) is carried_out
    # The same answer as if nothing had happened: "new" was written, not joined.
    assert ledger.write(batch, lease) == [Outcome.WRITTEN, Outcome.JOINED, Outcome.WRITTEN]
    assert ledger.output("a").token_ids == (5,)
    assert ledger.write([tokens("a", 1, 6)], lease) == [Outcome.WRITTEN]
    ledger.close()


def test_a_write_in_doubt_must_be_repeated_as_it_was(postgres_url: str) -> None:
    ledger = open_ledger(postgres_url)
    lease = ledger.take_lease("s", 60.0)
    with answer_of_commit_lost(ledger, carried_out=True), pytest.raises(LedgerUnavailable):
        ledger.write([submission()], lease)
    with pytest.raises(LedgerConflict, match="in doubt"):
        ledger.write([submission("b")], lease)
    ledger.close()


def test_a_commit_in_doubt_is_waited_for_while_the_server_works_on_it(postgres_url: str) -> None:
    ledger, server_side = open_ledger(postgres_url), connect(postgres_url)
    lease = ledger.take_lease("s", 60.0)
    with answer_of_commit_lost(ledger, carried_out=False), pytest.raises(LedgerUnavailable):
        ledger.write([submission()], lease)
    with server_side.write.begin() as connection:
        commits.count_up(connection, lease)
        with pytest.raises(LedgerUnavailable):
            ledger.write([submission()], lease)
    assert ledger.write([submission()], lease) == [Outcome.WRITTEN]
    assert ledger.find("a") is None, "carried out after all, by the word of the count"
    server_side.dispose()
    ledger.close()


def test_c74_a_commit_in_doubt_of_a_scheduler_that_lost_its_lease_stays_unwritten(postgres_url: str) -> None:
    ledger = open_ledger(postgres_url)
    lease, heir = ledger.take_lease("s", 0.0), ledger.take_lease("heir", 60.0)
    with answer_of_commit_lost(ledger, carried_out=False), pytest.raises(LedgerUnavailable):
        ledger.write([submission()], lease)
    ledger.take_over(heir, [lease.number])
    with pytest.raises(LeaseLost):
        ledger.write([submission()], lease)
    ledger.close()


def test_c73_what_a_crash_of_the_server_took_is_written_again() -> None:
    """Also when the server has given the lost transaction's number to another since, which it does."""
    with postgres_server() as server:
        ledger = open_ledger(server.url(server.create_database()))
        lease = ledger.take_lease("s", 60.0)
        run_to_decode(ledger)
        batch: list[Record] = [submission("new"), tokens("a", 0, 5)]
        event.listen(ledger._engines.write, "commit", lambda connection: server.kill(), once=True)
        with pytest.raises(LedgerUnavailable):
            ledger.write(batch, lease)
        server.start()
        for _ in range(10):
            server.execute(sql.SQL("SELECT pg_current_xact_id()"))
        assert ledger.write(batch, lease) == [Outcome.WRITTEN, Outcome.WRITTEN]
        assert ledger.find("new") is not None
        assert ledger.output("a").token_ids == (5,)
        ledger.close()


def test_durability_is_as_asked(url: str) -> None:
    for durable, expected in ((True, {"2", "on"}), (False, {"1", "off"})):
        engines = connect(url, durable=durable)
        query = "PRAGMA synchronous" if engines.dialect == "sqlite" else "SHOW synchronous_commit"
        with engines.write.connect() as connection:
            assert str(connection.exec_driver_sql(query).scalar_one()) in expected
        engines.dispose()


def test_the_log_of_sqlite_stays_within_its_bound(sqlite_url: str) -> None:
    page_size, prompt_bytes, prompt = 4096, 1 << 20, tuple(range(1 << 18))
    ledger = open_ledger(sqlite_url, durable=False)
    for number in range(2 * CHECKPOINT_PAGES * page_size // prompt_bytes):
        ledger.write([submission(f"request-{number}", prompt=prompt)])
    log = Path(f"{sqlite_url.removeprefix('sqlite:///')}-wal")
    assert CHECKPOINT_PAGES * page_size <= log.stat().st_size < CHECKPOINT_PAGES * page_size + 2 * prompt_bytes
    ledger.close()
