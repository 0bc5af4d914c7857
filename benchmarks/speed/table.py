"""The speed benchmark's tables: against the bars and the bare engine, what each process used, and beside peers."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from statistics import median

from benchmarks.speed.peers import PeerMeasured
from benchmarks.speed.workloads import Measured, Run
from benchmarks.tables import commit, processor, today


def table(model: str, repeat: int, length_scale: float, measured: Sequence[Measured], peers: Sequence[PeerMeasured]) -> str:
    scale = "" if length_scale == 1.0 else f" All lengths times {length_scale:g}: the bars do not count."
    lines = [
        f"# Speed, {model}, {today()}",
        "",
        f"`python -m benchmarks.speed` at {commit()}, medians of {repeat}; {os.cpu_count()} cores ({processor()}), Python "
        f"{platform.python_version()}, load {os.getloadavg()[0]:.1f} at the end. Through gRPC, the client included. Tokens/s are "
        f"output tokens, for W3 and W4 all tokens.{scale}",
    ]
    for precision in dict.fromkeys(one.precision for one in measured):
        lines += ["", *_precision(precision, [one for one in measured if one.precision == precision])]
    if peers:
        lines += ["", *_peers(measured, peers)]
    return "\n".join([*lines, ""])


def tokens_per_s(workload: str, measured: Sequence[Measured], peers: Sequence[PeerMeasured]) -> dict[str, float | None]:
    """Medians by server and precision, ours first; None for one that could not run."""
    runs: Mapping[str, Sequence[Run]] = {
        **{f"tokenmill {one.precision}": one.service for one in measured if one.workload.name == workload},
        **{peer.name: peer.runs.get(workload, ()) for peer in peers},
    }
    return {server: _median(some, lambda run: run.tokens_per_s) if some else None for server, some in runs.items()}


def in_words(tokens_per_s: float | None) -> str:
    return "–" if tokens_per_s is None else f"{tokens_per_s:,.0f}"


def _precision(precision: str, measured: Sequence[Measured]) -> list[str]:
    columns = ("workload", "tokens/s", "bar", "bare engine", "service / bare (bar ≥ 95 %)", "executor idle (bar ≤ 2 %)")
    latencies = ("first token, p50 ms", "inter-token, p50 ms")
    processes = ("bare engine", "executor", "scheduler", "client", "around the bare engine")
    return [
        f"## {precision}",
        "",
        *_head("", *columns, *latencies),
        *map(_speed_row, measured),
        "",
        "CPU milliseconds an output token, which a busy machine changes little:",
        "",
        *_head("", *processes),
        *map(_cpu_row, measured),
    ]


def _head(*columns: str) -> list[str]:
    return [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]


def _speed_row(one: Measured) -> str:
    service, bare = _median(one.service, lambda run: run.tokens_per_s), _median(one.bare, lambda run: run.tokens_per_s)
    share = median(ours.tokens_per_s / theirs.tokens_per_s for ours, theirs in zip(one.service, one.bare, strict=True))
    idle = _median(one.service, lambda run: run.idle_share)
    first_ms, next_ms = (_median(one.service, lambda run: run.first_token_ms), _median(one.service, lambda run: run.inter_token_ms))
    bar = one.workload.bars[one.precision]
    return (
        f"| {one.workload.name} | {one.workload.fixed} | {service:,.0f} | {bar:,} ({service / bar:.0%}) | {bare:,.0f} "
        f"| {share:.1%} | {idle:.2%} | {first_ms:,.0f} | {next_ms:,.1f} |"
    )


def _cpu_row(one: Measured) -> str:
    bare = median(run.cpu_ms["bare"] for run in one.bare)
    spent = [median(run.cpu_ms[process] for run in one.service) for process in ("executor", "scheduler", "client")]
    cells = " | ".join(f"{cpu_ms:.2f}" for cpu_ms in (bare, *spent, sum(spent) - bare))
    return f"| {one.workload.name} | {cells} |"


def _peers(measured: Sequence[Measured], peers: Sequence[PeerMeasured]) -> list[str]:
    workloads = {one.workload.name: one.workload for one in measured}
    rows = {name: tokens_per_s(name, measured, peers) for name in workloads}
    lines = [
        "## Beside peers",
        "",
        "The same prompts and counts on the same machine and day; tokens/s.",
        "",
        *_head("", *next(iter(rows.values())), "best seen before"),
    ]
    for name, row in rows.items():
        lines.append(f"| {name} | {' | '.join([*map(in_words, row.values()), workloads[name].best_seen])} |")
    return [*lines, "", *(f"- {peer.name}: {peer.how}" for peer in peers)]


def _median(runs: Sequence[Run], figure: Callable[[Run], float]) -> float:
    return median(figure(run) for run in runs)
