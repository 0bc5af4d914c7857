"""How many transactions of each scheduler were carried out, which tells whether one was whose answer was lost.

The meaning of each column is told in tokenmill_scheduler/ledger/tables.py.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "commits",
        sa.Column("lease", sa.BigInteger, nullable=False, autoincrement=False),
        sa.Column("number", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("lease", name="pk_commits"),
        sa.ForeignKeyConstraint(["lease"], ["leases.number"], name="fk_commits_lease", ondelete="CASCADE"),
    )
    op.execute("INSERT INTO commits (lease, number) SELECT number, 0 FROM leases")


def downgrade() -> None:
    op.drop_table("commits")
