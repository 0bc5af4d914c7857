"""Several schedulers on one database: a lease for each, what each has, and commands from one to another.

The meaning of each column is told in tokenmill_scheduler/ledger/tables.py.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # It was by executor; no release wrote to it.
    op.drop_table("leases")
    op.create_table(
        "leases",
        _serial(),
        sa.Column("scheduler", sa.Text, nullable=False),
        sa.Column("expires_s", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("number", name="pk_leases"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "commands",
        _serial(),
        sa.Column("lease", sa.BigInteger, nullable=False),
        sa.Column("request_id", sa.Text, nullable=False),
        sa.Column("verb", sa.Text, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("priority", sa.Integer),
        sa.Column("deadline_s", sa.Double),
        sa.PrimaryKeyConstraint("number", name="pk_commands"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_commands_lease", "commands", ["lease", "number"])
    op.add_column("requests", sa.Column("lease", sa.BigInteger))
    op.add_column("executors", sa.Column("address", sa.Text, nullable=False, server_default=""))
    op.add_column("executors", sa.Column("lease", sa.BigInteger))
    op.add_column("executors", sa.Column("inherited", sa.Integer, nullable=False, server_default="0"))


def downgrade() -> None:
    for table, column in (("executors", "inherited"), ("executors", "lease"), ("executors", "address"), ("requests", "lease")):
        op.drop_column(table, column)
    op.drop_table("commands")
    op.drop_table("leases")
    op.create_table(
        "leases",
        sa.Column("executor", sa.Text, nullable=False),
        sa.Column("owner", sa.Text, nullable=False),
        sa.Column("epoch", sa.BigInteger, nullable=False),
        sa.Column("expires_s", sa.Double, nullable=False),
        sa.ForeignKeyConstraint(["executor"], ["executors.executor"], name="fk_leases_executor", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("executor", name="pk_leases"),
    )


def _serial() -> sa.Column[int]:
    type_ = sa.BigInteger().with_variant(sa.Integer, "sqlite")
    return sa.Column("number", type_, sa.Identity(), nullable=False)
