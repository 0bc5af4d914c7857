from __future__ import annotations

import io
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from tokenmill_cli.main import main
from tokenmill_client import AsyncClient, Client, RetryPolicy

from tests.unit.client.fake_server import FakeServer

Run = Callable[..., tuple[int, str, str]]

# As the default one, in less time.
QUICK = RetryPolicy(first_delay_s=0.01, longest_delay_s=0.05, call_limit_s=2.0, attach_limit_s=10.0)


@pytest.fixture
def server() -> Iterator[FakeServer]:
    server = FakeServer()
    server.start()
    yield server
    server.stop()


@pytest.fixture
async def client(server: FakeServer) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(server.address, retry=QUICK) as client:
        yield client


@pytest.fixture
def run(server: FakeServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command against the fake server: exit code, standard output, standard error."""
    monkeypatch.setenv("TOKENMILL_SERVER", server.address)

    def run(*argv: str, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        code = main(argv)
        out, err = capsys.readouterr()
        return code, out, err

    return run


def submit(server: FakeServer, *request_ids: str, **options: Any) -> None:
    with Client(server.address) as client:
        for request_id in request_ids:
            client.submit("a", request_id=request_id, **options)
