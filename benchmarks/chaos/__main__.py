"""What survives: minutes of random faults to real processes, with 20 streams open, and a verdict on every token.

    python -m benchmarks.chaos [--minutes 2] [--database sqlite|postgresql|both] [--seed N] [--runs 1]

Scheduler, executors, PostgreSQL and clients are killed (SIGKILL) and started again, stopped (SIGSTOP) and continued, their
connections reset, cut off and slowed, by a schedule drawn from the seed. Then the faults stop, and all must end. The executors run
the simulated model, whose tokens can be foretold. Writes a dated table to benchmarks/results/; exit code 1 after any violation.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from pathlib import Path

from benchmarks.chaos.faults import KINDS, draw
from benchmarks.chaos.report import report, told
from benchmarks.chaos.run import Options, Outcome, run
from benchmarks.chaos.sent import Book
from benchmarks.chaos.system import System
from benchmarks.tables import keep


def main() -> int:
    arguments = _parse()
    databases = tuple(KINDS) if arguments.database == "both" else (arguments.database,)
    failed = False
    for database in databases:
        outcomes = [_one(database, arguments.seed + number, arguments) for number in range(arguments.runs)]
        table = report(outcomes)
        keep(f"chaos-{database}", table)
        failed = failed or any(outcome.violations for outcome in outcomes)
    return int(failed)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=2.0, help="of faults, in each run")
    parser.add_argument("--database", choices=(*KINDS, "both"), default="both")
    parser.add_argument("--seed", type=int, default=None, help="of the first run; drawn and printed when it is not given")
    parser.add_argument("--runs", type=int, default=1, help="on each database, each with the next seed")
    parser.add_argument("--gap", type=float, default=1.5, help="mean seconds from one fault's beginning to the next one's")
    parser.add_argument("--streams", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=400, help="most output tokens of a request")
    parser.add_argument("--logs", type=Path, default=None, help="a folder to keep the services' logs in")
    arguments = parser.parse_args()
    if arguments.seed is None:
        arguments.seed = random.SystemRandom().randrange(1 << 20)
    return arguments


def _one(database: str, seed: int, arguments: argparse.Namespace) -> Outcome:
    print(f"{database}, seed {seed}", flush=True)
    faults = draw(random.Random(seed), KINDS[database], arguments.minutes * 60, arguments.gap)
    options = Options(database, seed, arguments.streams, arguments.max_tokens, tuple(faults))
    outcome = asyncio.run(run(options, _show))
    for line in told(outcome):
        print(line)
    if arguments.logs is not None:
        folder = arguments.logs / f"{database}-{seed}"
        folder.mkdir(parents=True, exist_ok=True)
        for name, log in outcome.logs.items():
            (folder / f"{name}.log").write_text(log)
    return outcome


async def _show(system: System, book: Book) -> None:
    """A line that lives on a terminal; now and then a line elsewhere."""
    lives = sys.stderr.isatty()
    while True:
        under_way = ", ".join(f"{fault.target} {fault.action}" for fault in system.under_way) or "no fault"
        line = (
            f"{book.clock():5.0f} s  {len(system.befell):4} faults  {len(book.requests):6,} requests  {book.num_tokens:9,} tokens  "
            f"{book.violations} violations  now: {under_way}"
        )
        print(f"\r\x1b[K{line}" if lives else line, end="" if lives else "\n", file=sys.stderr, flush=True)
        await asyncio.sleep(0.5 if lives else 10.0)


if __name__ == "__main__":
    sys.exit(main())
