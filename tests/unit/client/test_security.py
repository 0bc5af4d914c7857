"""Tokens and TLS as the client and the command line send them, against a fake scheduler."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from tokenmill_cli.exits import ExitCode
from tokenmill_cli.main import main
from tokenmill_client import Client, PermissionDenied, Tls, Unauthenticated

from tests.fakes.certificates import Authority, Pair
from tests.unit.client.conftest import QUICK
from tests.unit.client.fake_server import FakeServer

TOKEN = "tm-secret"


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "authority")


@pytest.fixture
def shown(authority: Authority) -> Pair:
    return authority.issue("shown")


@pytest.fixture
def secure(authority: Authority) -> Iterator[FakeServer]:
    """Speaks mutual TLS."""
    served = authority.issue("served")
    pair = (served.key.read_bytes(), served.cert.read_bytes())
    server = FakeServer(grpc.ssl_server_credentials([pair], authority.ca.read_bytes(), require_client_auth=True))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    return path


def test_every_call_has_the_token(server: FakeServer) -> None:
    with Client(server.address, token=TOKEN, retry=QUICK) as client:
        server.cuts = [2, None]
        list(client.generate("x", request_id="r", max_tokens=5))
        client.get_request("r")
        client.admin.get_load()
        list(client.admin.list_requests())
    assert [call.split()[0] for call in server.calls] == ["Generate", "Attach", "GetRequest", "GetLoad", "ListRequests"]
    assert server.tokens == [f"Bearer {TOKEN}"] * 5


def test_refusals_have_errors_of_their_own(server: FakeServer) -> None:
    with Client(server.address) as client:
        server.refuse(grpc.StatusCode.UNAUTHENTICATED, "who are you")
        server.refuse(grpc.StatusCode.PERMISSION_DENIED, "not you")
        with pytest.raises(Unauthenticated, match="who are you"):
            client.list_models()
        with pytest.raises(PermissionDenied, match="not you"):
            client.list_models()


def test_blocking_client_over_tls(secure: FakeServer, authority: Authority, shown: Pair) -> None:
    with Client(secure.address, tls=Tls(str(authority.ca), str(shown.cert), str(shown.key))) as client:
        client.wait_ready(timeout=60)
        assert client.generate("x", max_tokens=3).result().usage.output_tokens == 3


# ---- command line --------------------------------------------------------------------------------------------------------------


def test_command_line_by_flags(secure: FakeServer, authority: Authority, shown: Pair, token_file: Path) -> None:
    tls = ["--tls-ca", str(authority.ca), "--tls-cert", str(shown.cert), "--tls-key", str(shown.key)]
    assert main(["--server", secure.address, *tls, "--token-file", str(token_file), "models", "list"]) == ExitCode.OK
    assert secure.tokens == [f"Bearer {TOKEN}"]


def test_command_line_by_environment(
    secure: FakeServer, authority: Authority, shown: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "SERVER": secure.address,
        "CLIENT_TLS_CA": str(authority.ca),
        "CLIENT_TLS_CERT": str(shown.cert),
        "CLIENT_TLS_KEY": str(shown.key),
        "TOKEN": TOKEN,
    }.items():
        monkeypatch.setenv(f"TOKENMILL_{name}", value)
    assert main(["models", "list"]) == ExitCode.OK
    assert secure.tokens == [f"Bearer {TOKEN}"]


def test_a_file_of_a_token_wins_over_the_environment(server: FakeServer, token_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENMILL_TOKEN", "tm-other")
    monkeypatch.setenv("TOKENMILL_TOKEN_FILE", str(token_file))
    assert main(["--server", server.address, "load"]) == ExitCode.OK
    assert server.tokens == [f"Bearer {TOKEN}"]


def test_mistakes_get_a_sentence(
    secure: FakeServer, authority: Authority, shown: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    none, bad = tmp_path / "none", tmp_path / "bad"
    bad.write_text("tm secret")
    ca = ["--tls-ca", str(authority.ca)]
    for flags, code, sentence in (
        (["--token-file", str(none)], ExitCode.USAGE, f"{none} cannot be read: No such file or directory."),
        (["--token-file", str(bad)], ExitCode.USAGE, "The token must be printable ASCII characters without spaces."),
        (["--tls-ca", str(none)], ExitCode.USAGE, f"{none} cannot be read: No such file or directory."),
        ([*ca, "--tls-cert", str(shown.cert)], ExitCode.USAGE, "give both, or neither."),
        (["--tls-ca", str(shown.key)], ExitCode.USAGE, "The files for TLS are not PEM"),
        ([], ExitCode.UNAVAILABLE, "does it want TLS, or another client certificate? See --tls-ca, --tls-cert and --tls-key."),
        (["--tls"], ExitCode.UNAVAILABLE, "No TLS connection to"),
    ):
        assert main(["--server", secure.address, *flags, "load"]) == code
        said = capsys.readouterr().err
        assert sentence in said
        assert "secret" not in said


def test_a_refused_token_is_told_with_what_to_do(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.refuse(grpc.StatusCode.UNAUTHENTICATED, "this service needs a token")
    assert main(["--server", server.address, "load"]) == ExitCode.REFUSED
    assert "this service needs a token. Give it with --token-file or TOKENMILL_TOKEN." in capsys.readouterr().err
    server.refuse(grpc.StatusCode.PERMISSION_DENIED, "ann is a client")
    assert main(["--server", server.address, "load"]) == ExitCode.REFUSED
    assert "ann is a client" in capsys.readouterr().err


def test_serve_all_with_tls_wants_its_authority(authority: Authority, capsys: pytest.CaptureFixture[str]) -> None:
    pair = authority.issue("served")
    flags = ["--model", "simulated", "--tls-cert", str(pair.cert), "--tls-key", str(pair.key)]
    assert main(["serve", "all", *flags]) == ExitCode.USAGE
    assert "tokenmill --tls-ca FILE serve all" in capsys.readouterr().err
