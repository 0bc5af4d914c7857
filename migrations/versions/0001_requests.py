"""Requests, their transitions and tokens; executors and leases; views for operators.

The meaning of each column is told in tokenmill_scheduler/ledger/tables.py, that of each view in migrations/README.md.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_UNFINISHED = sa.text("finished_s IS NULL")
_FINISHED = sa.text("finished_s IS NOT NULL")


def upgrade() -> None:
    _create_requests()
    _create_transitions()
    _create_output()
    _create_executors()
    for name, query in _views(op.get_bind().dialect.name).items():
        op.execute(f"CREATE VIEW {name} AS {query}")


def downgrade() -> None:
    for name in reversed(_views(op.get_bind().dialect.name)):
        op.execute(f"DROP VIEW {name}")
    for name in ("leases", "executors", "tails", "tokens", "transitions", "requests"):
        op.drop_table(name)


def _serial() -> sa.Column[int]:
    type_ = sa.BigInteger().with_variant(sa.Integer, "sqlite")
    return sa.Column("number", type_, sa.Identity(), nullable=False)


def _request_id(table: str) -> tuple[sa.Column[str], sa.ForeignKeyConstraint]:
    return sa.Column("request_id", sa.Text, nullable=False), sa.ForeignKeyConstraint(
        ["request_id"], ["requests.request_id"], name=f"fk_{table}_request_id", ondelete="CASCADE"
    )


def _create_requests() -> None:
    op.create_table(
        "requests",
        _serial(),
        sa.Column("request_id", sa.Text, nullable=False),
        sa.Column("payload_digest", sa.LargeBinary, nullable=False),
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("tenant", sa.Text, nullable=False),
        sa.Column("priority", sa.Integer, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("arrival_s", sa.Double, nullable=False),
        sa.Column("deadline_s", sa.Double),
        sa.Column("detached", sa.Integer, nullable=False),
        sa.Column("executor", sa.Text, nullable=False),
        sa.Column("preemptions", sa.Integer, nullable=False),
        sa.Column("num_output_tokens", sa.Integer, nullable=False),
        sa.Column("first_token_s", sa.Double),
        sa.Column("finished_s", sa.Double),
        sa.Column("finish_reason", sa.Text),
        sa.Column("error", sa.Text, nullable=False),
        sa.Column("error_code", sa.Integer, nullable=False),
        sa.Column("parameters", sa.Text, nullable=False),
        sa.Column("prompt", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("number", name="pk_requests"),
        sa.UniqueConstraint("request_id", name="uq_requests_request_id"),
    )
    op.create_index("ix_requests_arrival", "requests", ["arrival_s", "number"])
    op.create_index(
        "ix_requests_unfinished", "requests", ["arrival_s", "number"], sqlite_where=_UNFINISHED, postgresql_where=_UNFINISHED
    )
    op.create_index("ix_requests_retention", "requests", ["finished_s"], sqlite_where=_FINISHED, postgresql_where=_FINISHED)


def _create_transitions() -> None:
    op.create_table(
        "transitions",
        _serial(),
        *_request_id("transitions"),
        sa.Column("before_state", sa.Text),
        sa.Column("after_state", sa.Text, nullable=False),
        sa.Column("at_s", sa.Double, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("executor", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("number", name="pk_transitions"),
    )
    op.create_index("ix_transitions_request", "transitions", ["request_id", "number"])


def _create_output() -> None:
    op.create_table(
        "tokens",
        *_request_id("tokens"),
        sa.Column("first_index", sa.Integer, nullable=False, autoincrement=False),
        sa.Column("count", sa.Integer, nullable=False),
        sa.Column("token_ids", sa.LargeBinary, nullable=False),
        sa.Column("logprobs", sa.LargeBinary),
        sa.PrimaryKeyConstraint("request_id", "first_index", name="pk_tokens"),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "tails",
        *_request_id("tails"),
        sa.Column("first_index", sa.Integer, nullable=False),
        sa.Column("count", sa.Integer, nullable=False),
        sa.Column("token_ids", sa.LargeBinary, nullable=False),
        sa.Column("logprobs", sa.LargeBinary, nullable=False),
        sa.Column("first_token_s", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("request_id", name="pk_tails"),
        sqlite_with_rowid=False,
    )
    if op.get_bind().dialect.name == "postgresql":
        # Room in each page for the next version of its rows, so that growing a tail touches no index; and soon cleaned.
        op.execute(
            "ALTER TABLE tails SET (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 10000)"
        )


def _create_executors() -> None:
    op.create_table(
        "executors",
        sa.Column("executor", sa.Text, nullable=False),
        sa.Column("epoch", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("executor", name="pk_executors"),
    )
    op.create_table(
        "leases",
        sa.Column("executor", sa.Text, nullable=False),
        sa.Column("owner", sa.Text, nullable=False),
        sa.Column("epoch", sa.BigInteger, nullable=False),
        sa.Column("expires_s", sa.Double, nullable=False),
        sa.ForeignKeyConstraint(["executor"], ["executors.executor"], name="fk_leases_executor", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("executor", name="pk_leases"),
    )


def _views(dialect: str) -> dict[str, str]:
    """In the order to be created: later ones read earlier ones."""
    now_s = "(julianday('now') - 2440587.5) * 86400.0" if dialect == "sqlite" else "extract(epoch FROM now())::float8"

    def time(seconds: str) -> str:
        return f"datetime({seconds}, 'unixepoch')" if dialect == "sqlite" else f"to_timestamp({seconds})"

    return {
        "request_overview": f"""
            SELECT r.request_id, r.tenant, r.model, r.priority, r.state, r.executor, r.preemptions,
                   COALESCE(t.first_index + t.count, r.num_output_tokens) AS num_output_tokens,
                   COALESCE(r.finished_s, {now_s}) - r.arrival_s AS age_s,
                   COALESCE(t.first_token_s, r.first_token_s) - r.arrival_s AS time_to_first_token_s,
                   {time("r.arrival_s")} AS arrived_at,
                   {time("r.deadline_s")} AS deadline_at,
                   {time("COALESCE(t.first_token_s, r.first_token_s)")} AS first_token_at,
                   {time("r.finished_s")} AS finished_at,
                   r.finish_reason, r.error
            FROM requests r LEFT JOIN tails t ON t.request_id = r.request_id""",
        "queue_overview": """
            SELECT tenant, priority, state, COUNT(*) AS requests, MAX(age_s) AS oldest_age_s,
                   SUM(num_output_tokens) AS num_output_tokens
            FROM request_overview
            WHERE finished_at IS NULL
            GROUP BY tenant, priority, state""",
        "state_times": f"""
            SELECT request_id, after_state AS state, {time("at_s")} AS entered_at, reason,
                   COALESCE(LEAD(at_s) OVER w, {now_s}) - at_s AS duration_s
            FROM transitions
            WINDOW w AS (PARTITION BY request_id ORDER BY number)""",
        "time_in_state": """
            SELECT request_id, state, COUNT(*) AS times, SUM(duration_s) AS duration_s
            FROM state_times
            WHERE state NOT IN ('done', 'cancelled', 'expired', 'failed')
            GROUP BY request_id, state""",
    }
