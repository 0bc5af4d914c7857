"""Lanes, queue timeouts and retries of requests; what operators did, and what they hold back; the views by lane.

The meaning of each column is told in tokenmill_scheduler/ledger/tables.py, that of each view in migrations/README.md.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

_COLUMNS = ("lane", "queue_deadline_s", "retry_of")


def upgrade() -> None:
    _drop_views()
    op.add_column("requests", sa.Column("lane", sa.Text, nullable=False, server_default="standard"))
    op.add_column("requests", sa.Column("queue_deadline_s", sa.Double))
    op.add_column("requests", sa.Column("retry_of", sa.Text, nullable=False, server_default=""))
    _create_actions()
    op.create_table(
        "holds",
        sa.Column("target", sa.Text, nullable=False),
        sa.Column("actor", sa.Text, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("at_s", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("target", name="pk_holds"),
    )
    _create_views(request_columns=", r.lane, r.retry_of", group="tenant, lane, priority, state")


def downgrade() -> None:
    _drop_views()
    op.drop_table("holds")
    op.drop_table("actions")
    for column in reversed(_COLUMNS):
        op.drop_column("requests", column)
    _create_views(request_columns="", group="tenant, priority, state")


def _create_actions() -> None:
    type_ = sa.BigInteger().with_variant(sa.Integer, "sqlite")
    op.create_table(
        "actions",
        sa.Column("number", type_, sa.Identity(), nullable=False),
        sa.Column("at_s", sa.Double, nullable=False),
        sa.Column("actor", sa.Text, nullable=False),
        sa.Column("verb", sa.Text, nullable=False),
        sa.Column("target", sa.Text, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("detail", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("number", name="pk_actions"),
    )
    op.create_index("ix_actions_target", "actions", ["target", "number"])
    op.create_index("ix_actions_at", "actions", ["at_s"])


def _drop_views() -> None:
    op.execute("DROP VIEW queue_overview")
    op.execute("DROP VIEW request_overview")


def _create_views(request_columns: str, group: str) -> None:
    """As in revision 0001, with more columns of `requests r`; `group` are the columns that the queue is counted by."""
    sqlite = op.get_bind().dialect.name == "sqlite"
    now_s = "(julianday('now') - 2440587.5) * 86400.0" if sqlite else "extract(epoch FROM now())::float8"

    def time(seconds: str) -> str:
        return f"datetime({seconds}, 'unixepoch')" if sqlite else f"to_timestamp({seconds})"

    op.execute(f"""
        CREATE VIEW request_overview AS
            SELECT r.request_id, r.tenant, r.model, r.priority, r.state, r.executor, r.preemptions,
                   COALESCE(t.first_index + t.count, r.num_output_tokens) AS num_output_tokens,
                   COALESCE(r.finished_s, {now_s}) - r.arrival_s AS age_s,
                   COALESCE(t.first_token_s, r.first_token_s) - r.arrival_s AS time_to_first_token_s,
                   {time("r.arrival_s")} AS arrived_at,
                   {time("r.deadline_s")} AS deadline_at,
                   {time("COALESCE(t.first_token_s, r.first_token_s)")} AS first_token_at,
                   {time("r.finished_s")} AS finished_at,
                   r.finish_reason, r.error{request_columns}
            FROM requests r LEFT JOIN tails t ON t.request_id = r.request_id""")
    op.execute(f"""
        CREATE VIEW queue_overview AS
            SELECT {group}, COUNT(*) AS requests, MAX(age_s) AS oldest_age_s, SUM(num_output_tokens) AS num_output_tokens
            FROM request_overview
            WHERE finished_at IS NULL
            GROUP BY {group}""")
