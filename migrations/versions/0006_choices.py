"""Requests for several choices: a row each, the further ones naming the first; prompt tokens that were not computed.

The meaning of each column is told in tokenmill_scheduler/ledger/tables.py, that of each view in migrations/README.md.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

_COLUMNS = ("parent", "choice", "cached_tokens")


def upgrade() -> None:
    _drop_views()
    op.add_column("requests", sa.Column("parent", sa.Text, nullable=False, server_default=""))
    op.add_column("requests", sa.Column("choice", sa.Integer, nullable=False, server_default="0"))
    op.add_column("requests", sa.Column("cached_tokens", sa.Integer, nullable=False, server_default="0"))
    _name_parents()
    further = sa.text("parent <> ''")
    op.create_index("ix_requests_parent", "requests", ["parent"], sqlite_where=further, postgresql_where=further)
    _create_views(request_columns=", r.parent, r.choice, r.cached_tokens")


def downgrade() -> None:
    _drop_views()
    op.drop_index("ix_requests_parent", "requests")
    for column in reversed(_COLUMNS):
        op.drop_column("requests", column)
    _create_views(request_columns="")


def _name_parents() -> None:
    """Of choices that a downgrade has left as requests of their own: only they have no payload, and a slash in their id."""
    if op.get_bind().dialect.name == "sqlite":
        parent, choice = "substr(request_id, 1, instr(request_id, '/') - 1)", "substr(request_id, instr(request_id, '/') + 1)"
    else:
        parent, choice = "split_part(request_id, '/', 1)", "split_part(request_id, '/', 2)"
    op.execute(f"""
        UPDATE requests SET parent = {parent}, choice = CAST({choice} AS INTEGER)
        WHERE length(payload_digest) = 0 AND request_id LIKE '%/%'""")


def _drop_views() -> None:
    op.execute("DROP VIEW queue_overview")
    op.execute("DROP VIEW request_overview")


def _create_views(request_columns: str) -> None:
    """As in revision 0003, with more columns of `requests r`."""
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
                   r.finish_reason, r.error, r.lane, r.retry_of{request_columns}
            FROM requests r LEFT JOIN tails t ON t.request_id = r.request_id""")
    op.execute("""
        CREATE VIEW queue_overview AS
            SELECT tenant, lane, priority, state, COUNT(*) AS requests, MAX(age_s) AS oldest_age_s,
                   SUM(num_output_tokens) AS num_output_tokens
            FROM request_overview
            WHERE finished_at IS NULL
            GROUP BY tenant, lane, priority, state""")
