"""Requests as people read them: a table of many, and of one its facts, life and choices. Must not know: how they were asked for."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from tokenmill_client import RequestInfo
from tokenmill_client.admin_records import RequestLife
from tokenmill_client.records import RequestSnapshot

from tokenmill_cli.output import age, local_time, table

_COLUMNS = ("REQUEST", "STATE", "LANE", "PRIO", "TOKENS", "AGE", "TENANT")


def request_table(infos: Sequence[RequestInfo]) -> Table:
    rows = [
        (
            info.request_id,
            info.state,
            info.lane,
            info.priority,
            f"{info.usage.prompt_tokens}+{info.usage.output_tokens}",
            age(info.submitted_at),
            info.tenant,
        )
        for info in infos
    ]
    return table(_COLUMNS, rows, right=("PRIO", "TOKENS", "AGE"))


def request_facts(info: RequestInfo) -> list[tuple[str, object]]:
    return [
        ("request", info.request_id),
        ("model", info.model),
        ("tenant", info.tenant),
        ("state", info.state),
        ("finish reason", info.finish_reason),
        ("error", info.error),
        ("waits because", f"{info.wait_reason} ({info.wait_code})" if info.wait_code else info.wait_reason),
        ("executor", info.executor),
        ("lane", info.lane),
        ("priority", info.priority),
        ("choice", f"{info.choice} of {info.n} of {info.parent_id or info.request_id}" if info.n > 1 else ""),
        ("second try of", info.retry_of),
        ("tokens", f"{info.usage.prompt_tokens} prompt, {info.usage.output_tokens} output"),
        ("preemptions", info.preemptions),
        ("detached", "yes" if info.detached else "no"),
        ("submitted", local_time(info.submitted_at)),
        ("first token", local_time(info.first_token_at)),
        ("finished", local_time(info.finished_at)),
        ("deadline", local_time(info.deadline)),
    ]


def choice_table(snapshot: RequestSnapshot) -> Table:
    rows = [
        (part.choice, part.info.request_id, part.info.state, part.info.finish_reason or "–", part.info.usage.output_tokens)
        for part in snapshot.choices
    ]
    return table(("CHOICE", "REQUEST", "STATE", "FINISH REASON", "TOKENS"), rows, right=("CHOICE", "TOKENS"))


def transition_table(life: RequestLife) -> Table:
    """Times as seconds since the first."""
    start = life.transitions[0].at if life.transitions else None
    rows = [
        (f"+{(move.at - start).total_seconds():.3f} s", move.after, move.reason) for move in life.transitions if start is not None
    ]
    return table(("TIME", "STATE", "REASON"), rows, right=("TIME",))
