"""What a hold consists in, beside that it holds: the policy that an operator has set.

The meaning of each column is told in tokenmill_scheduler/ledger/tables.py, that of each view in migrations/README.md.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("holds", sa.Column("detail", sa.Text, nullable=False, server_default=""))


def downgrade() -> None:
    op.execute("DELETE FROM holds WHERE target = '*policy*'")
    op.drop_column("holds", "detail")
