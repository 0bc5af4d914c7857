"""Alembic's entry: runs the revisions on the connection that tokenmill_scheduler.ledger.migrate gives it, in its transaction.

There is no alembic.ini: use `tokenmill db upgrade|downgrade|current|check`, or the functions of that module.
"""

from alembic import context

context.configure(connection=context.config.attributes["connection"], target_metadata=None)
context.run_migrations()
