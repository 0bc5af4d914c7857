"""A process is killed in the middle of writing: what it said was stored is stored, and nothing is half there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tokenmill_scheduler.core.request import State
from tokenmill_scheduler.ledger.sql import open_ledger

from tests.fakes.ledger_records import run_to_decode

ROOT = Path(__file__).parents[3]
STREAMS = 8
STEPS_BEFORE_KILL = 100

# Steps of two tokens for every stream through the writer, a new request with every step; each commit is told on stdout.
WRITER = f"""
import asyncio, sys
from tests.fakes.ledger_records import submission
from tokenmill_scheduler.core.effects import TokensGenerated
from tokenmill_scheduler.ledger.sql import open_ledger
from tokenmill_scheduler.ledger.writer import LedgerWriter

async def main():
    writer = LedgerWriter(open_ledger(sys.argv[1]), lambda error: sys.exit(str(error)))
    writer.start()
    ids = tuple(f"r{{number}}" for number in range({STREAMS}))
    step = 0
    while True:
        flat = tuple(index for _ in ids for index in (2 * step, 2 * step + 1))
        tokens = TokensGenerated(ids, (2 * step,) * {STREAMS}, (2,) * {STREAMS}, flat, 1.0)
        writer.append([submission(f"new{{step}}"), tokens], lambda _, step=step: print(step, flush=True))
        step += 1
        while writer.backlog > 50:
            await asyncio.sleep(0)
        await asyncio.sleep(0)

asyncio.run(main())
"""


def test_c72_what_was_acknowledged_survives_a_kill(url: str) -> None:
    ledger = open_ledger(url)
    for number in range(STREAMS):
        run_to_decode(ledger, f"r{number}")
    ledger.close()
    process = subprocess.Popen([sys.executable, "-c", WRITER, url], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if int(line) >= STEPS_BEFORE_KILL:
            break
    process.kill()
    told = [int(line) for line in process.stdout.read().split("\n")[:-1]]
    process.wait()
    process.stdout.close()
    acknowledged = max([STEPS_BEFORE_KILL, *told]) + 1

    ledger = open_ledger(url)
    found = {stored.request.request_id: (stored.state, output.token_ids) for stored, output in ledger.unfinished()}
    streams = [found.pop(f"r{number}") for number in range(STREAMS)]
    stored_steps = len(streams[0][1]) // 2
    assert stored_steps >= acknowledged
    # All streams end at the same step: its record was stored whole, with the submission beside it.
    assert streams == [(State.DECODE, tuple(range(2 * stored_steps)))] * STREAMS
    assert sorted(found) == sorted(f"new{step}" for step in range(stored_steps))
    ledger.close()
