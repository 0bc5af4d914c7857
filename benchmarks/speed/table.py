"""The speed benchmark's tables: against the bars and the bare engine, what each process used, and beside peers."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Callable, Sequence
from statistics import median

from benchmarks.speed.peers import PeerMeasured
from benchmarks.speed.workloads import Measured, Run
from benchmarks.tables import today


def table(model: str, repeat: int, length_scale: float, measured: Sequence[Measured], peers: Sequence[PeerMeasured]) -> str:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    scale = "" if length_scale == 1.0 else f" All lengths times {length_scale:g}: the bars do not count."
    lines = [
        f"# Speed, {model}, {today()}",
        "",
        f"`python -m benchmarks.speed` at {commit}, medians of {repeat}; {os.cpu_count()} cores ({platform.machine()}), Python "
        f"{platform.python_version()}, load {os.getloadavg()[0]:.1f} at the end. Through gRPC, the client included. Tokens/s are "
        f"output tokens, for W3 and W4 all tokens.{scale}",
    ]
    for precision in dict.fromkeys(one.precision for one in measured):
        lines += ["", *_precision(precision, [one for one in measured if one.precision == precision])]
    if peers:
        lines += ["", *_peers(measured, peers)]
    return "\n".join([*lines, ""])


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
    precisions = list(dict.fromkeys(one.precision for one in measured))
    columns = [*(f"tokenmill {precision}" for precision in precisions), *(peer.name for peer in peers), "best seen before"]
    lines = [
        "## Beside peers",
        "",
        "The same prompts and counts on the same machine and day; tokens/s.",
        "",
        *_head("", *columns),
    ]
    for workload in dict.fromkeys(one.workload.name for one in measured):
        ours = [one for one in measured if one.workload.name == workload]
        cells = [f"{_median(one.service, lambda run: run.tokens_per_s):,.0f}" for one in ours]
        cells += [_tokens_per_s(peer.runs.get(workload, [])) for peer in peers]
        lines.append(f"| {workload} | {' | '.join([*cells, ours[0].workload.best_seen])} |")
    return [*lines, "", *(f"- {peer.name}: {peer.how}" for peer in peers)]


def _tokens_per_s(runs: Sequence[Run]) -> str:
    return f"{_median(runs, lambda run: run.tokens_per_s):,.0f}" if runs else "–"


def _median(runs: Sequence[Run], figure: Callable[[Run], float]) -> float:
    return median(figure(run) for run in runs)
