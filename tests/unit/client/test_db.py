"""`tokenmill db` on a real SQLite file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenmill_cli.main import main

pytest.importorskip("alembic")


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'requests.db'}"


def test_up_and_down(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["db", "check", "--database", url]) == 1
    assert "run `tokenmill db upgrade`" in capsys.readouterr().err
    assert main(["db", "upgrade", "--database", url]) == 0
    capsys.readouterr()
    assert main(["db", "check", "--database", url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"state": "current"}
    assert main(["db", "current", "--database", url, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["current"] == document["head"]
    assert main(["db", "downgrade", "base", "--yes", "--database", url]) == 0
    capsys.readouterr()
    assert main(["db", "current", "--database", url]) == 0
    assert capsys.readouterr().out.startswith("empty (")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["current", "--database", "mysql://x/y"], "not supported"),
        (["current", "--database", "nonsense"], "no database URL"),
        (["upgrade", "no-such-revision"], "no-such-revision"),
    ],
)
def test_mistakes_are_one_sentence(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], argv: list[str], words: str
) -> None:
    monkeypatch.setenv("TOKENMILL_DATABASE", url)
    assert main(["db", *argv]) == 1
    err = capsys.readouterr().err
    assert words in err
    assert err.startswith("Error: ")
    assert err.count("\n") == 1
