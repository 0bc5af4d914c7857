"""The ledger's tables, as SQLAlchemy Core sees them. `migrations/` makes them; a test compares the two.

A request's output lies in two places. Its newest tokens are in its one row of `tails`, which grows in place; when a tail is long
enough it moves to `tokens` as a chunk that never changes again. One token for each of 256 streams thus touches the few dozen
pages of `tails`, not 256 pages all over `tokens`: measured on SQLite, five times the tokens a second.

Times are Unix seconds. Must not know: connections, dialect differences beyond types.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Double, ForeignKey, Identity, Index, Integer, LargeBinary, MetaData, Table, Text, text

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)

# SQLite numbers rows by itself only in a column of type INTEGER.
_Serial = BigInteger().with_variant(Integer, "sqlite")


def _request_id(*, primary_key: bool = False) -> Column[str]:
    owner = ForeignKey("requests.request_id", ondelete="CASCADE")
    return Column("request_id", Text, owner, primary_key=primary_key, nullable=False)


requests = Table(
    "requests",
    metadata,
    # Order of acceptance: breaks ties of arrival.
    Column("number", _Serial, Identity(), primary_key=True),
    Column("request_id", Text, nullable=False, unique=True),
    Column("payload_digest", LargeBinary, nullable=False),
    Column("model", Text, nullable=False),
    Column("tenant", Text, nullable=False),
    Column("priority", Integer, nullable=False),
    Column("state", Text, nullable=False),
    Column("arrival_s", Double, nullable=False),
    Column("deadline_s", Double),
    Column("detached", Integer, nullable=False),
    # The executor it runs on, empty when it does not run.
    Column("executor", Text, nullable=False),
    Column("preemptions", Integer, nullable=False),
    # The five below are set when the request ends; until then output is counted in `tails`.
    Column("num_output_tokens", Integer, nullable=False),
    Column("first_token_s", Double),
    Column("finished_s", Double),
    Column("finish_reason", Text),
    Column("error", Text, nullable=False),
    Column("error_code", Integer, nullable=False),
    # Of the scheduler that has it, or had it when it ended; null before any scheduler took it up.
    Column("lease", BigInteger),
    Column("lane", Text, nullable=False),
    Column("queue_deadline_s", Double),
    # The FAILED request that it is a second try of, or empty. That one may have been pruned.
    Column("retry_of", Text, nullable=False),
    # Of a further choice of a request, that request, which is the first choice; else empty. Choices are counted from 0.
    Column("parent", Text, nullable=False),
    Column("choice", Integer, nullable=False),
    # Prompt tokens that were not computed when it was first admitted: cached, or shared with another choice.
    Column("cached_tokens", Integer, nullable=False),
    # JSON: sampling, stop, include_stop, cache_salt, n, best_of, logprobs_hidden.
    Column("parameters", Text, nullable=False),
    # Token ids, packed little-endian u32. Last, so that reading the other columns does not read through it.
    Column("prompt", LargeBinary, nullable=False),
    Index("ix_requests_arrival", "arrival_s", "number"),
    Index(
        "ix_requests_unfinished",
        "arrival_s",
        "number",
        sqlite_where=text("finished_s IS NULL"),
        postgresql_where=text("finished_s IS NULL"),
    ),
    Index("ix_requests_parent", "parent", sqlite_where=text("parent <> ''"), postgresql_where=text("parent <> ''")),
    Index(
        "ix_requests_retention",
        "finished_s",
        sqlite_where=text("finished_s IS NOT NULL"),
        postgresql_where=text("finished_s IS NOT NULL"),
    ),
)

transitions = Table(
    "transitions",
    metadata,
    Column("number", _Serial, Identity(), primary_key=True),
    _request_id(),
    # Null in a request's first transition: it was submitted.
    Column("before_state", Text),
    Column("after_state", Text, nullable=False),
    Column("at_s", Double, nullable=False),
    Column("reason", Text, nullable=False),
    Column("executor", Text, nullable=False),
    Index("ix_transitions_request", "request_id", "number"),
)

# Output that is complete as a chunk: token_ids are packed little-endian u32, logprobs as in codec.py or null.
tokens = Table(
    "tokens",
    metadata,
    _request_id(primary_key=True),
    Column("first_index", Integer, primary_key=True, autoincrement=False),
    Column("count", Integer, nullable=False),
    Column("token_ids", LargeBinary, nullable=False),
    Column("logprobs", LargeBinary),
    sqlite_with_rowid=False,
)

# The newest output of a request that has not ended: grows by guarded updates, `first_index + count` is the next index.
tails = Table(
    "tails",
    metadata,
    _request_id(primary_key=True),
    Column("first_index", Integer, nullable=False),
    Column("count", Integer, nullable=False),
    Column("token_ids", LargeBinary, nullable=False),
    Column("logprobs", LargeBinary, nullable=False),
    Column("first_token_s", Double, nullable=False),
    sqlite_with_rowid=False,
)

# `epoch` is the highest ever given out for this executor.
executors = Table(
    "executors",
    metadata,
    Column("executor", Text, primary_key=True),
    Column("epoch", BigInteger, nullable=False),
    Column("address", Text, nullable=False),
    # Of the scheduler that drives it; null when none does.
    Column("lease", BigInteger),
    # 1: that scheduler took it over from a fallen one and was not told of it itself.
    Column("inherited", Integer, nullable=False),
    # 1: that scheduler has it connected, as it last said; 0: it waits for it.
    Column("connected", Integer, nullable=False),
    # JSON: what it can hold, as it last said; empty before it was first connected.
    Column("description", Text, nullable=False),
)

# One row for each scheduler process that may write. The number, never used again, is its fencing number: whoever takes over deletes
# the row, and a transaction that does not find the row of its scheduler writes nothing. `expires_s` 0: given up.
leases = Table(
    "leases",
    metadata,
    Column("number", _Serial, Identity(), primary_key=True),
    Column("scheduler", Text, nullable=False),
    Column("expires_s", Double, nullable=False),
    sqlite_autoincrement=True,
)

# How many transactions the writer of this lease has carried out, on PostgreSQL; see commits.py.
commits = Table(
    "commits",
    metadata,
    Column("lease", BigInteger, ForeignKey("leases.number", ondelete="CASCADE"), primary_key=True, autoincrement=False),
    Column("number", BigInteger, nullable=False),
)

# What one scheduler asks another to do with a request that is the other's; deleted once it is done.
commands = Table(
    "commands",
    metadata,
    Column("number", _Serial, Identity(), primary_key=True),
    # Of the scheduler it is for.
    Column("lease", BigInteger, nullable=False),
    Column("request_id", Text, nullable=False),
    Column("verb", Text, nullable=False),
    Column("reason", Text, nullable=False),
    Column("priority", Integer),
    Column("deadline_s", Double),
    # Of the action to be recorded with it; empty when no operator asks.
    Column("actor", Text, nullable=False),
    Column("detail", Text, nullable=False),
    # Executors that a request which changes hands is suspected to have cost.
    Column("losses", Integer, nullable=False),
    Index("ix_commands_lease", "lease", "number"),
    sqlite_autoincrement=True,
)

# What operators did. `target` is a request's id or an executor's name; empty: the queue.
actions = Table(
    "actions",
    metadata,
    Column("number", _Serial, Identity(), primary_key=True),
    Column("at_s", Double, nullable=False),
    Column("actor", Text, nullable=False),
    Column("verb", Text, nullable=False),
    Column("target", Text, nullable=False),
    Column("reason", Text, nullable=False),
    Column("detail", Text, nullable=False),
    Index("ix_actions_target", "target", "number"),
    Index("ix_actions_at", "at_s"),
)

# What operators hold back until they say otherwise: an executor that is drained, by name, or the queue, under the empty name.
holds = Table(
    "holds",
    metadata,
    Column("target", Text, primary_key=True),
    Column("actor", Text, nullable=False),
    Column("reason", Text, nullable=False),
    Column("at_s", Double, nullable=False),
    # That of the action: the policy that was set.
    Column("detail", Text, nullable=False),
)
