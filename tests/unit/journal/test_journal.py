"""The journal is whole or says what it lacks, and a replay decides the same or says where it does not."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from tokenmill_scheduler.core.events import Cancelled, QueuePaused, Tick
from tokenmill_scheduler.core.policy import Fcfs
from tokenmill_scheduler.core.scheduler import Scheduler, SchedulerConfig
from tokenmill_scheduler.journal import writer as writer_module
from tokenmill_scheduler.journal.lines import JournalError
from tokenmill_scheduler.journal.replay import replay
from tokenmill_scheduler.journal.scheduler import JournaledScheduler
from tokenmill_scheduler.journal.writer import JournalWriter

from tests.unit.journal.journals import MAX_BYTES, write_journal


def objects(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def asleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread writes nothing before the journal is closed."""
    monkeypatch.setattr(writer_module, "INTERVAL_S", 1e6)


# ---- replay --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["journal.jsonl", "journal.jsonl.gz"])
@pytest.mark.parametrize("policy", ["fcfs", "priority", "lpm"])
def test_a_replay_decides_the_same(tmp_path: Path, name: str, policy: str) -> None:
    core = write_journal(tmp_path / name, SchedulerConfig(4, 32, policy=policy)).core
    replayed = replay(tmp_path / name)
    assert (replayed.difference, replayed.missing, replayed.full) == (None, 0, False)
    assert replayed.plans == core.counters.steps
    assert core.counters.preemptions > 0
    assert replayed.config == core.config
    assert (tmp_path / name).read_bytes().startswith(b"\x1f\x8b") == name.endswith(".gz")


def test_a_replay_finds_a_planted_difference(tmp_path: Path) -> None:
    """One request of the journal gets another priority's place: the first plan that admits it differs, and no event before."""
    path = tmp_path / "journal"
    write_journal(path, SchedulerConfig(4, 32, policy="priority"))
    rows = objects(path)
    changed = next(
        row for row in rows if row.get("event", {}).get("type") == "Submitted" and row["event"]["request"]["request_id"] == "9"
    )
    changed["event"]["request"]["priority"] = 7
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    difference = replay(path).difference
    assert difference is not None
    assert difference.entry.number > changed["n"]
    assert any("9 waiting → prefill" in line for line in difference.got)
    assert not any("9 waiting → prefill" in line for line in difference.entry.led_to)
    assert difference.got_digest != difference.entry.digest


def test_a_replay_finds_that_the_core_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "journal"
    write_journal(path)
    monkeypatch.setattr(Fcfs, "rank", lambda self, live: (-live.ordinal,))
    difference = replay(path).difference
    assert difference is not None
    assert difference.entry.led_to != difference.got


def test_a_difference_in_tokens_alone_is_in_the_digest(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    write_journal(path)
    text = path.read_text(encoding="utf-8")
    index = text.index('"token_ids":[0', text.index('"ResultArrived"'))
    path.write_text(text[:index] + text[index:].replace('"token_ids":[0', '"token_ids":[8', 1), encoding="utf-8")
    difference = replay(path).difference
    assert difference is not None
    assert difference.entry.led_to == difference.got
    assert difference.entry.digest != difference.got_digest


def test_what_the_core_raised_is_the_last_entry_and_raised_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an event that finds a bug: the service ends, and the replay stands where it did."""
    path = tmp_path / "journal"
    writer = JournalWriter(path, SchedulerConfig(), MAX_BYTES)
    core = JournaledScheduler(SchedulerConfig(), writer)
    core.handle(Tick(), 1.0)
    with monkeypatch.context() as bug:
        bug.setattr(Scheduler, "_cancelled", _bug)
        with pytest.raises(ZeroDivisionError):
            core.handle(Cancelled("r", "a test"), 2.0)
        writer.close()
        assert objects(path)[-1]["led_to"] == ["raised ZeroDivisionError('a bug')"]
        assert (replay(path).difference, replay(path).events) == (None, 2)
    difference = replay(path).difference
    assert difference is not None
    assert (difference.entry.number, difference.got) == (2, ())


def _bug(*arguments: object) -> None:
    raise ZeroDivisionError("a bug")


def test_an_observer_sees_every_event(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    write_journal(path)
    seen: list[float] = []
    replayed = replay(path, lambda core, at_s, event, effects: seen.append(at_s))
    assert len(seen) == replayed.events == len(objects(path)) - 1
    assert seen == sorted(seen)


@pytest.mark.parametrize("compressed", [False, True])
def test_a_journal_of_a_killed_process_is_read_to_its_last_whole_line(tmp_path: Path, compressed: bool) -> None:
    path = tmp_path / "journal"
    write_journal(path)
    whole = replay(path).events
    data = gzip.compress(path.read_bytes()) if compressed else path.read_bytes()
    path.write_bytes(data[: -60 if compressed else -10])
    replayed = replay(path)
    assert replayed.difference is None
    assert whole - 20 < replayed.events < whole


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "no JSON"),
        (b"requests,tokens\n", "no JSON"),
        (b'{"journal": 99, "config": {}}\n', "does not begin"),
        (b'{"journal": 1, "config": {"colour": 1}}\n', "configuration"),
        (
            b'{"journal": 1, "config": {}}\n{"n": 1, "at": 0, "event": {"type": "Abducted"}, "led_to": [], "digest": ""}\n',
            "event 1",
        ),
        (b'{"journal": 1, "config": {}}\n[]\n', "no JSON object"),
        (b"\x1f\x8bnonsense", "damaged"),
        (b"\xff\xfe\n", "no JSON"),
    ],
)
def test_what_is_no_journal_of_this_release(tmp_path: Path, data: bytes, words: str) -> None:
    path = tmp_path / "journal"
    path.write_bytes(data)
    with pytest.raises(JournalError, match=words):
        replay(path)


# ---- writing -------------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("asleep")
def test_a_writer_that_falls_behind_says_so_instead_of_waiting(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    writer = JournalWriter(path, SchedulerConfig(), MAX_BYTES, max_buffered=2)
    for number in range(10):
        writer.happened(float(number), Tick(), [])
    writer.close()
    assert [row.get("n", row) for row in objects(path)[1:]] == [1, 2, {"missing": 8}]
    replayed = replay(path)
    assert (replayed.events, replayed.missing) == (2, 8)


@pytest.mark.usefixtures("asleep")
def test_a_gap_is_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    writer = JournalWriter(path, SchedulerConfig(), MAX_BYTES, max_buffered=2)
    for _ in range(3):
        writer.happened(0.0, Tick(), [])
    writer._drain()
    writer.happened(1.0, QueuePaused("a test"), [])
    writer.close()
    assert [row.get("n", row) for row in objects(path)[1:]] == [1, 2, {"missing": 1}, 4]


def test_the_file_is_bounded_and_says_that_it_is_full(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    write_journal(path, max_bytes=20_000)
    assert path.stat().st_size < 30_000
    assert list(objects(path)[-1]) == ["full"]
    replayed = replay(path)
    assert (replayed.difference, replayed.full) == (None, True)


def test_the_journal_of_the_process_before_is_kept_beside(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    write_journal(path, count=2)
    before = path.read_bytes()
    write_journal(path, count=3)
    assert (tmp_path / "journal.1").read_bytes() == before
    assert replay(path).difference is None


def test_a_full_disk_ends_the_journal_and_nothing_else() -> None:
    writer = JournalWriter(Path("/dev/full"), SchedulerConfig(), MAX_BYTES)
    for number in range(1000):
        writer.happened(float(number), Cancelled("r" * 100, "a test"), [])
    writer.close()


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        JournalWriter(tmp_path / "nowhere" / "journal", SchedulerConfig(), MAX_BYTES)
