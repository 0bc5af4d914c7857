"""Child services: where they listen, how they end. The child here is this very module."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import click
import pytest
from tokenmill_cli.exits import CommandError
from tokenmill_cli.flags import has_flag, route
from tokenmill_cli.processes import Service

MODULE = "tests.unit.client.test_processes"


def start(folder: Path, *flags: str) -> tuple[Service, list[str]]:
    lines: list[str] = []
    return Service("child", MODULE, flags, folder, lines.append), lines


def test_a_service_tells_its_address_and_stops(tmp_path: Path) -> None:
    service, lines = start(tmp_path)
    with service:
        assert service.address() == "127.0.0.1:1234"
        assert service.exit_code is None
        assert service.stop() == 0
    assert lines == ["started", "stopping"]


def test_one_that_ends_before_it_is_ready_gives_its_code(tmp_path: Path) -> None:
    service, lines = start(tmp_path, "--fail")
    with service, pytest.raises(CommandError, match="ended with code 7") as caught:
        service.address()
    assert caught.value.code == 7
    assert lines == ["started", "no good"]


def test_a_death_by_signal_is_told_as_shells_do(tmp_path: Path) -> None:
    service, _ = start(tmp_path, "--die")
    with service:
        assert service.wait() == 128 + signal.SIGKILL


def test_an_address_of_the_last_run_is_not_believed(tmp_path: Path) -> None:
    (tmp_path / "child.address").write_text("stale")
    service, _ = start(tmp_path, "--fail")
    with service, pytest.raises(CommandError):
        service.address()


def test_missing_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenmill_cli.processes.importlib.util.find_spec", lambda name: None)
    with pytest.raises(CommandError, match=r"pip install 'tokenmill\[scheduler\]'"):
        Service("scheduler", "tokenmill_scheduler", (), tmp_path, print)


def test_flags_go_to_the_service_that_knows_them() -> None:
    flags = (
        "--model",
        "simulated",
        "--batching=static",
        "--max-num-seqs",
        "4",
        "--database",
        "sqlite:///x.db",
        "--listen",
        "unix:/s",
        "--metrics-address=127.0.0.1:0",
    )
    executor, scheduler = route(flags)
    assert executor == ["--model", "simulated", "--max-num-seqs", "4"]
    assert scheduler[:5] == ["--batching=static", "--max-num-seqs", "4", "--database", "sqlite:///x.db"]
    assert scheduler[5:] == ["--listen", "unix:/s", "--metrics-address=127.0.0.1:0"]
    assert route(()) == ([], [])


@pytest.mark.parametrize("flag", ["--nonsense", "--port-file", "--executor", "stray"])
def test_flags_that_serve_all_does_not_take(flag: str) -> None:
    with pytest.raises(click.UsageError, match=flag):
        route((flag, "x"))


def test_has_flag() -> None:
    assert has_flag(("--model", "x"), "--model")
    assert has_flag(("--model=x",), "--model")
    assert not has_flag(("--model-len=3", "x"), "--model")


if __name__ == "__main__":
    import os

    print("started")
    if "--fail" in sys.argv:
        print("no good")
        sys.exit(7)
    if "--die" in sys.argv:
        os.kill(os.getpid(), signal.SIGKILL)

    def stop(number: int, frame: object) -> None:
        print("stopping")
        sys.exit(0)

    signal.signal(signal.SIGTERM, stop)
    Path(sys.argv[-1]).write_text("127.0.0.1:1234")
    while True:
        time.sleep(60)
