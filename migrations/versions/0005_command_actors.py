"""Who asked: a command from one scheduler to another carries what is to be recorded of its operator.

The meaning of each column is told in tokenmill_scheduler/ledger/tables.py.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("commands") as commands:
        commands.add_column(sa.Column("actor", sa.Text, nullable=False, server_default=""))
        commands.add_column(sa.Column("detail", sa.Text, nullable=False, server_default=""))


def downgrade() -> None:
    with op.batch_alter_table("commands") as commands:
        commands.drop_column("detail")
        commands.drop_column("actor")
