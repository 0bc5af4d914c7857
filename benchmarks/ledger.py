"""What the ledger does on this machine, on SQLite and on a PostgreSQL server started for the run.

    python -m benchmarks.ledger [--repeat 3] [--seconds 5] [--database URL ...]

For each database: tokens stored a second when 256 streams get a token each, commit after commit; the latency that
commit-then-tell adds to a token (handed over → told, through LedgerWriter) at a steady 50,000 tokens a second; durable submits a
second from concurrent submitters through LedgerWriter. Beside them the raw fsync of the same disk, which no durable commit can
beat: between the figures, and in the same seconds as the steady tokens. The PostgreSQL server has the files of its log as one that
has run for a while. Writes a dated table to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import platform
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from psycopg import sql
from tokenmill_scheduler.core.effects import TokensGenerated, Transitioned
from tokenmill_scheduler.core.request import Request, Sampling, State
from tokenmill_scheduler.ledger.records import Lease, Outcome, Submission
from tokenmill_scheduler.ledger.sql import SqlLedger, open_ledger
from tokenmill_scheduler.ledger.writer import LedgerWriter
from tokenmill_service.collector import keep_collector_off_the_hot_path

from benchmarks.tables import keep, today
from tests.fakes.postgres import PostgresServer, postgres_server

STREAMS = 256
PACED_TOKENS_PER_S = 50_000
SUBMITTERS = 128
# Of 16 MB: those of 1 GB.
LOG_FILES = 64
FSYNC_INTERVAL_S = 0.02


@dataclass
class Latencies:
    """Seconds."""

    values: list[float] = field(default_factory=list)

    def percentile(self, percent: int) -> float:
        return statistics.quantiles(self.values, n=100)[percent - 1]

    def milliseconds(self, percent: int) -> str:
        return f"{self.percentile(percent) * 1e3:.2f}"


@dataclass(frozen=True)
class Measured:
    database: str
    stored_tokens_per_s: float
    commit: Latencies
    paced_tokens_per_s: float
    added: Latencies
    fsync_meanwhile: Latencies
    submits_per_s: float
    submit: Latencies
    fsync: Latencies


class Streams:
    """256 decoding requests in a ledger, and the record of each next step."""

    def __init__(self, ledger: SqlLedger, lease: Lease, prefix: str) -> None:
        self._ids = tuple(f"{prefix}-{number:026d}" for number in range(STREAMS))
        self._steps = 0
        now_s = time.time()
        ledger.write([_submission(request_id, now_s) for request_id in self._ids], lease)
        ledger.write(
            [Transitioned(request_id, State.WAITING, State.PREFILL, now_s, executor="x") for request_id in self._ids], lease
        )
        ledger.write(
            [Transitioned(request_id, State.PREFILL, State.DECODE, now_s, executor="x") for request_id in self._ids], lease
        )

    def step(self) -> TokensGenerated:
        index, self._steps = self._steps, self._steps + 1
        return TokensGenerated(self._ids, (index,) * STREAMS, (1,) * STREAMS, tuple(range(index, index + STREAMS)), time.time())


def _submission(request_id: str, now_s: float) -> Submission:
    request = Request(request_id, "model", tuple(range(200)), Sampling(max_tokens=100_000, seed=1), arrival_s=now_s)
    return Submission(request, b"digest of the payload, 32 bytes.")


def store_tokens(ledger: SqlLedger, lease: Lease, seconds: float) -> tuple[float, Latencies]:
    """One commit after the other, one step each: no merging of steps helps."""
    streams = Streams(ledger, lease, f"stored-{lease.number}")
    latencies = Latencies()
    start_s = now_s = time.perf_counter()
    while now_s < start_s + seconds:
        ledger.write([streams.step()], lease)
        before_s, now_s = now_s, time.perf_counter()
        latencies.values.append(now_s - before_s)
    return len(latencies.values) * STREAMS / (now_s - start_s), latencies


async def pace_tokens(ledger: SqlLedger, lease: Lease, seconds: float) -> tuple[float, Latencies]:
    """Steps at even intervals, as an executor would send results."""
    streams = Streams(ledger, lease, f"paced-{lease.number}")
    latencies = Latencies()
    interval_s = STREAMS / PACED_TOKENS_PER_S
    writer = LedgerWriter(ledger, _fail)
    writer.start(lease)
    start_s = time.perf_counter()
    steps = int(seconds / interval_s)
    for number in range(steps):
        await asyncio.sleep(max(0.0, start_s + number * interval_s - time.perf_counter()))
        writer.append([streams.step()], _note(latencies, time.perf_counter()))
    await writer.close(timeout_s=60)
    return steps * STREAMS / (time.perf_counter() - start_s), latencies


def _note(latencies: Latencies, since_s: float) -> Callable[[list[Outcome]], None]:
    return lambda _outcomes: latencies.values.append(time.perf_counter() - since_s)


async def submit(ledger: SqlLedger, lease: Lease, seconds: float) -> tuple[float, Latencies]:
    latencies = Latencies()
    writer = LedgerWriter(ledger, _fail)
    writer.start(lease)
    start_s = time.perf_counter()

    async def submitter(number: int) -> None:
        count = 0
        while (since_s := time.perf_counter()) < start_s + seconds:
            outcome = await writer.submit(_submission(f"submitted-{lease.number}-{number}-{count}", time.time()))
            assert outcome is Outcome.WRITTEN
            latencies.values.append(time.perf_counter() - since_s)
            count += 1

    await asyncio.gather(*map(submitter, range(SUBMITTERS)))
    rate = len(latencies.values) / (time.perf_counter() - start_s)
    await writer.close(timeout_s=60)
    return rate, latencies


def _fail(error: Exception) -> None:
    raise error


def raw_fsync(folder: Path, times: int = 200) -> list[float]:
    """Appends of 8 KiB, each made durable."""
    seconds = []
    with (folder / "fsync").open("wb", buffering=0) as file:
        for _ in range(times):
            start_s = time.perf_counter()
            file.write(bytes(8192))
            os.fsync(file.fileno())
            seconds.append(time.perf_counter() - start_s)
    return seconds


@contextlib.contextmanager
def fsyncs_meanwhile(folder: Path) -> Iterator[Latencies]:
    """Of 8 KiB in place, as a database writes its log: few, so that they hold up little themselves."""
    latencies, over = Latencies(), threading.Event()

    def run() -> None:
        with (folder / "fsync-meanwhile").open("wb", buffering=0) as file:
            while not over.wait(FSYNC_INTERVAL_S):
                start_s = time.perf_counter()
                file.seek(0)
                file.write(bytes(8192))
                os.fdatasync(file.fileno())
                latencies.values.append(time.perf_counter() - start_s)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield latencies
    finally:
        over.set()
        thread.join()


def measure(url: str, name: str, folder: Path, seconds: float) -> Measured:
    ledger = open_ledger(url)
    keep_collector_off_the_hot_path()
    # Every write of a scheduler is fenced by its lease.
    lease = ledger.take_lease("benchmark", lease_s=3600.0)
    fsync = Latencies(raw_fsync(folder))
    stored_tokens_per_s, commit = store_tokens(ledger, lease, seconds)
    fsync.values += raw_fsync(folder)
    with fsyncs_meanwhile(folder) as meanwhile:
        paced_tokens_per_s, added = asyncio.run(pace_tokens(ledger, lease, seconds))
    fsync.values += raw_fsync(folder)
    submits_per_s, submitted = asyncio.run(submit(ledger, lease, seconds))
    fsync.values += raw_fsync(folder)
    ledger.close()
    return Measured(name, stored_tokens_per_s, commit, paced_tokens_per_s, added, meanwhile, submits_per_s, submitted, fsync)


def middle(runs: Sequence[Measured]) -> Measured:
    """Each figure's median; of latencies the run whose 99th percentile is that."""

    def latencies(pick: Callable[[Measured], Latencies]) -> Latencies:
        return sorted(map(pick, runs), key=lambda found: found.percentile(99))[len(runs) // 2]

    added = latencies(lambda run: run.added)
    return Measured(
        runs[0].database,
        statistics.median(run.stored_tokens_per_s for run in runs),
        latencies(lambda run: run.commit),
        statistics.median(run.paced_tokens_per_s for run in runs),
        added,
        next(run.fsync_meanwhile for run in runs if run.added is added),
        statistics.median(run.submits_per_s for run in runs),
        latencies(lambda run: run.submit),
        latencies(lambda run: run.fsync),
    )


@contextlib.contextmanager
def databases(urls: list[str], folder: Path) -> Iterator[list[tuple[str, str]]]:
    """URLs and names of those asked for, or else of a new one of each kind."""
    if urls:
        yield [(url, url.partition(":")[0]) for url in urls]
        return
    with postgres_server(fsync=True) as server:
        _wear_in(server)
        yield [(f"sqlite:///{folder}/ledger.db", "SQLite"), (server.url(server.create_database()), "PostgreSQL")]


def _wear_in(server: PostgresServer) -> None:
    """A new server makes each file of its log anew, which holds up a commit for some 12 ms; one that has run for a while uses those
    that are there again, and keeps them with the setting that docker-compose.yml has, too. All that it will keep are made here."""
    server.execute(sql.SQL("ALTER SYSTEM SET min_wal_size = '1GB'"))
    # No checkpoint meanwhile: it would have files used again before all are made.
    server.execute(sql.SQL("ALTER SYSTEM SET max_wal_size = '4GB'"))
    server.execute(sql.SQL("SELECT pg_reload_conf()"))
    for _ in range(LOG_FILES):
        server.execute(sql.SQL("SELECT pg_logical_emit_message(false, 'benchmark', ''), pg_switch_wal()"))
    server.execute(sql.SQL("CHECKPOINT"))
    server.execute(sql.SQL("ALTER SYSTEM RESET max_wal_size"))
    server.execute(sql.SQL("SELECT pg_reload_conf()"))


def table(results: list[Measured], repeat: int, seconds: float) -> str:
    def row(title: str, bar: str, cell: Callable[[Measured], str]) -> str:
        return f"| {title} | {bar} | " + " | ".join(map(cell, results)) + " |"

    def both(pick: Callable[[Measured], Latencies]) -> Callable[[Measured], str]:
        return lambda measured: f"{pick(measured).milliseconds(50)} / {pick(measured).milliseconds(99)}"

    return "\n".join(
        [
            f"# Ledger, {today()}",
            "",
            f"`python -m benchmarks.ledger`, medians of {repeat}, {seconds:g} s a figure, {os.cpu_count()} cores "
            f"({platform.machine()}), Python {platform.python_version()}, load {os.getloadavg()[0]:.1f} at the end. Durable "
            "against a power cut.",
            "",
            "| | bar | " + " | ".join(measured.database for measured in results) + " |",
            "|---|---|" + "---|" * len(results),
            row(f"tokens stored/s, {STREAMS} streams, a commit each step", "≥ 50,000", lambda m: f"{m.stored_tokens_per_s:,.0f}"),
            row("its commit, p50 / p99 ms", "", both(lambda m: m.commit)),
            row(f"added latency at {PACED_TOKENS_PER_S:,} tokens/s, p50 / p99 ms", "p99 ≤ 5", both(lambda m: m.added)),
            row("raw fsync in the same seconds, p50 / p99 ms", "", both(lambda m: m.fsync_meanwhile)),
            row("tokens/s reached there", "", lambda m: f"{m.paced_tokens_per_s:,.0f}"),
            row(f"durable submits/s, {SUBMITTERS} submitters, prompt of 200", "≥ 2,000", lambda m: f"{m.submits_per_s:,.0f}"),
            row("a submit, p50 / p99 ms", "", both(lambda m: m.submit)),
            row("raw fsync of 8 KiB between the figures, p50 / p99 ms", "", both(lambda m: m.fsync)),
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--repeat", type=int, default=3, help="runs, of which the table has medians")
    parser.add_argument("--database", action="append", default=[], help="a database to fill instead of new ones; may be repeated")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, databases(arguments.database, Path(folder)) as chosen:
        runs = [[measure(url, name, Path(folder), arguments.seconds) for url, name in chosen] for _ in range(arguments.repeat)]
    results = [middle(of_one) for of_one in zip(*runs, strict=True)]
    report = table(results, arguments.repeat, arguments.seconds)
    keep("ledger", report)


if __name__ == "__main__":
    main()
