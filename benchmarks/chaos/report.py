"""A run's outcome as a dated table in Markdown."""

from __future__ import annotations

import os
import platform
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from benchmarks.chaos.audit import count_by_kind
from benchmarks.chaos.faults import KINDS, Kind
from benchmarks.chaos.run import Outcome, Waits, left_quiet, next_token_waits
from benchmarks.tables import today

# What must be 0, and what it means.
VIOLATIONS = {
    "lost": "accepted, but not in the database",
    "unknown": "in the database, but never sent",
    "hanging": "not ended once the faults were over",
    "ended wrongly": "cancelled, expired or failed without cause, or told otherwise than stored",
    "illegal": "a move the state machine does not have, or more than one end",
    "duplicated": "an index twice",
    "missing": "an index never",
    "wrong": "another token than foretold, or told otherwise than stored",
    "errors": "an answer that no client should get",
    "crashes": "a service ended by itself",
    "not idle": "blocks or sequences held after all had ended",
}


def report(outcomes: Sequence[Outcome]) -> str:
    """All of one database."""
    options = outcomes[0].options
    seeds = ", ".join(str(outcome.options.seed) for outcome in outcomes)
    minutes = sum(outcome.wall_s for outcome in outcomes) / 60
    return "\n".join(
        [
            f"# Chaos on {options.database}, {today()}",
            "",
            f"`python -m benchmarks.chaos --database {options.database}`, {minutes:.1f} minutes, seeds {seeds}, "
            f"{options.streams} clients; {os.cpu_count()} cores ({platform.machine()}), "
            f"Python {platform.python_version()}, load {os.getloadavg()[0]:.1f} at the end.",
            "",
            *_requests(outcomes),
            "",
            *_violations(outcomes),
            "",
            *_faults(outcomes),
            "",
        ]
    )


def _requests(outcomes: Sequence[Outcome]) -> list[str]:
    sent = [sent for outcome in outcomes for sent in outcome.book.requests]
    ends = Counter(stored.state for outcome in outcomes for stored in outcome.stored.values())
    unasked = sum(
        outcome.stored[one.ask.request_id].state == "cancelled"
        for outcome in outcomes
        for one in outcome.book.requests
        if not one.cancelled and not one.abandoned and one.ask.request_id in outcome.stored
    )
    rows = {
        "requests sent": len(sent),
        "accepted": sum(len(outcome.stored) for outcome in outcomes),
        **{f"ended {state}": count for state, count in sorted(ends.items())},
        "of those cancelled, since their only connection broke": unasked,
        "preempted at least once": sum(
            any(move.after == "preempted" for move in stored.moves) for outcome in outcomes for stored in outcome.stored.values()
        ),
        "tokens told to clients": sum(len(one.tokens) for one in sent),
        "schedulers that ended, fenced by another": sum(outcome.fenced for outcome in outcomes),
        "slowest to end once the faults were over, s": f"{max(outcome.settled_s for outcome in outcomes):.1f}",
    }
    return ["| requests | |", "|---|---:|", *(f"| {what} | {_number(count)} |" for what, count in rows.items())]


def _violations(outcomes: Sequence[Outcome]) -> list[str]:
    counts = count_by_kind([violation for outcome in outcomes for violation in outcome.violations])
    rows = [f"| {kind}: {meaning} | {_number(counts[kind])} |" for kind, meaning in VIOLATIONS.items()]
    return ["| violations | |", "|---|---:|", *rows]


def _faults(outcomes: Sequence[Outcome]) -> list[str]:
    lasted: dict[Kind, list[float]] = defaultdict(list)
    waits: dict[Kind, Waits] = defaultdict(Waits)
    every = Waits()
    for outcome in outcomes:
        for fault in outcome.befell:
            lasted[fault.fault.kind].append(fault.healed_s - fault.from_s)
            if left_quiet(fault, outcome.befell):
                of_this = next_token_waits(fault, outcome.befell, outcome.book)
                waits[fault.fault.kind] += of_this
                every += of_this
    kinds = KINDS[outcomes[0].options.database]
    rows = [_row(f"{target} {action}", lasted[target, action], waits[target, action]) for target, action in kinds]
    header = [
        "The next token of streams in mid-sentence: seconds after the fault was over and its victim served again. Of faults that",
        "left no other under way; a wait that the next fault cut short is counted, but not measured.",
        "",
        "| fault | times | mean length, s | streams | cut short | next token, median s | mean s | max s |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    return [*header, *rows, _row("all", [length for of_kind in lasted.values() for length in of_kind], every)]


def _row(name: str, lasted: Sequence[float], waits: Waits) -> str:
    length = f"{statistics.mean(lasted):.1f}" if lasted else "–"
    seconds = waits.seconds
    figures = [statistics.median(seconds), statistics.mean(seconds), max(seconds)] if seconds else []
    cells = [f"{figure:.2f}" for figure in figures] or ["–"] * 3
    return f"| {name} | {len(lasted)} | {length} | {len(seconds)} | {waits.cut_short} | {' | '.join(cells)} |"


def _number(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def told(outcome: Outcome, at_most: int = 20) -> Iterable[str]:
    """The violations one by one."""
    for violation in outcome.violations[:at_most]:
        yield f"{violation.kind}: {violation.request_id} {violation.text}"
    if len(outcome.violations) > at_most:
        yield f"… and {len(outcome.violations) - at_most} more"
