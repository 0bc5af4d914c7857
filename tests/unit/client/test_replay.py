"""`tokenmill replay`: what it says of journals that are whole, changed, cut, or none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenmill_cli.exits import ExitCode
from tokenmill_cli.main import main

from tests.unit.journal.journals import write_journal


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    write_journal(tmp_path / "journal")
    return tmp_path / "journal"


def replay(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = main(["replay", *argv])
    out, err = capsys.readouterr()
    return code, out, err


def changed(journal: Path) -> Path:
    """A result brings another token than it did."""
    text = journal.read_text(encoding="utf-8")
    index = text.index('"token_ids":[0', text.index('"ResultArrived"'))
    journal.write_text(text[:index] + text[index:].replace('"token_ids":[0', '"token_ids":[8', 1), encoding="utf-8")
    return journal


def test_the_same(journal: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = replay(capsys, str(journal))
    assert (code, err) == (ExitCode.OK, "")
    assert out.endswith("plans: the core decides the same, byte for byte.\n")


def test_the_first_difference(journal: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = replay(capsys, str(changed(journal)))
    assert code == ExitCode.FAILURE
    lines = out.splitlines()
    assert lines[0].startswith("Event ")
    assert {line.split()[0] for line in lines[1:]} == {"event", "expected", "got"}
    document = json.loads(replay(capsys, str(journal), "--json")[1])
    assert (document["same"], document["difference"]["event"]) == (False, "ResultArrived")
    assert document["difference"]["expected"]["digest"] != document["difference"]["got"]["digest"]
    assert replay(capsys, str(journal), "--policy", "lpm")[0] == ExitCode.FAILURE


def test_what_another_policy_would_have_done(journal: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = replay(capsys, str(journal), "--policy", "lpm,static", "--plots", str(tmp_path / "plots"))
    assert code == ExitCode.OK
    assert "a step's cost fitted to" in out
    assert out.splitlines()[3].split() == ["recorded", "as", "it", "was", "lpm", "static"]
    assert len(list((tmp_path / "plots").iterdir())) == 3


def test_a_gap_is_said(journal: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = journal.read_text(encoding="utf-8").splitlines()
    journal.write_text("\n".join([*lines[:20], '{"missing": 5}', *lines[25:]]) + "\n", encoding="utf-8")
    code, out, err = replay(capsys, str(journal))
    assert code == ExitCode.OK
    assert out.startswith("19 events")
    assert "lacks the next 5 events" in err


@pytest.mark.parametrize(
    ("text", "argv", "words"),
    [
        ("nonsense\n", [], "cannot be replayed: a line is no JSON"),
        (None, [], "cannot be read: No such file"),
        ('{"journal": 1, "config": {}}\n', ["--policy", "fcfs"], "cannot be simulated: no request was recorded"),
    ],
)
def test_mistakes_are_one_sentence(
    text: str | None, argv: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "journal"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    code, out, err = replay(capsys, str(path), *argv)
    assert (code, out) == (ExitCode.USAGE, "")
    assert words in err


def test_a_policy_that_there_is_not(journal: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = replay(capsys, str(journal), "--policy", "nope")
    assert (code, "'nope' is none of fcfs" in err) == (ExitCode.USAGE, True)
