"""What each scheduler's executors can hold, and whether it has them connected: for requests that none of another's can.

The meaning of each column is told in tokenmill_scheduler/ledger/tables.py.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("executors", sa.Column("connected", sa.Integer, nullable=False, server_default="0"))
    op.add_column("executors", sa.Column("description", sa.Text, nullable=False, server_default=""))
    op.add_column("commands", sa.Column("losses", sa.Integer, nullable=False, server_default="0"))


def downgrade() -> None:
    op.drop_column("commands", "losses")
    op.drop_column("executors", "description")
    op.drop_column("executors", "connected")
