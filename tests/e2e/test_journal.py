"""A real scheduler's plan journal: replayed by the command line in another process, and under another policy."""

from __future__ import annotations

import json

from tests.e2e.commands import tokenmill
from tests.fakes.processes import Processes


def test_a_journal_is_replayed_and_shows_what_another_policy_would_have_done(processes: Processes) -> None:
    journal = processes.folder / "journal.jsonl.gz"
    executor = processes.executor()
    flags = ("--plan-journal", str(journal), "--max-num-seqs", "4")
    scheduler = processes.scheduler(executor.address, flags=flags)
    assert tokenmill("bench", "burst", "--limit", "12", "--server", scheduler.address).returncode == 0
    assert scheduler.stop() == 0

    replayed = tokenmill("replay", str(journal), "--json", PYTHONHASHSEED="7")
    assert replayed.returncode == 0, replayed.stderr
    document = json.loads(replayed.stdout)
    assert (document["same"], document["missing_events"]) == (True, 0)
    # How many depends on when the requests came.
    assert document["plans"] > 10

    words = tokenmill("replay", str(journal))
    assert words.stdout.endswith("the core decides the same, byte for byte.\n")

    predicted = tokenmill("replay", str(journal), "--policy", "lpm,static", "--json")
    assert predicted.returncode == 0, predicted.stderr
    runs = {run["name"]: run["figures"] for run in json.loads(predicted.stdout)["runs"]}
    assert list(runs) == ["recorded", "as it was", "lpm", "static"]
    assert {figures["output_tokens"] for figures in runs.values()} == {runs["recorded"]["output_tokens"]}
    assert runs["static"]["output_tokens_per_s"] < runs["as it was"]["output_tokens_per_s"]


def test_a_journal_that_cannot_be_written_is_said_at_the_start(processes: Processes) -> None:
    done = tokenmill("serve", "scheduler", "--plan-journal", "/nowhere/journal", "--database", f"sqlite:///{processes.folder}/db")
    assert done.returncode == 2
    assert "--plan-journal /nowhere/journal cannot be written: No such file or directory" in done.stdout + done.stderr
