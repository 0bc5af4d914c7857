"""Files for TLS, of both services: an operator's mistake gets one sentence before anything is served."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenmill_executor.__main__ as executor
import tokenmill_executor.settings
import tokenmill_scheduler.__main__ as scheduler
import tokenmill_scheduler.settings
from cryptography.hazmat.primitives import serialization
from tokenmill_service import address
from tokenmill_service.flags import SettingsError
from tokenmill_service.tls import channel_credentials, server_credentials

from tests.fakes.certificates import Authority

Parse = Callable[[list[str], dict[str, str]], Any]


def _executors(argv: list[str], environ: dict[str, str]) -> Any:
    return tokenmill_executor.settings.parse_settings(["--model", "simulated", *argv], environ)


SERVICES: dict[str, Parse] = {"scheduler": tokenmill_scheduler.settings.parse_settings, "executor": _executors}


@pytest.fixture(params=SERVICES)
def parse(request: pytest.FixtureRequest) -> Parse:
    return SERVICES[request.param]


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "authority")


def test_flags_and_environment(parse: Parse) -> None:
    environ = {"TOKENMILL_TLS_CERT": "c.pem", "TOKENMILL_TLS_KEY": "k.pem", "TOKENMILL_TLS_CLIENT_CA": "ca.pem"}
    tls = parse([], environ).tls
    assert (tls.cert, tls.key, tls.client_ca) == (Path("c.pem"), Path("k.pem"), Path("ca.pem"))
    assert parse(["--tls-client-ca="], environ).tls.client_ca is None
    assert parse(["--tls-cert=", "--tls-key=", "--tls-client-ca="], environ).tls is None
    assert parse([], {}).tls is None


@pytest.mark.parametrize("flags", [["--tls-cert", "c"], ["--tls-key", "k"], ["--tls-client-ca", "ca", "--tls-cert", "c"]])
def test_half_a_pair(parse: Parse, flags: list[str]) -> None:
    with pytest.raises(SettingsError, match="one is missing: give a certificate and its private key"):
        parse(flags, {})


def test_a_unix_socket_takes_no_tls(parse: Parse) -> None:
    with pytest.raises(SettingsError, match="of no use on a unix socket"):
        parse(["--listen", "unix:x", "--tls-cert", "c", "--tls-key", "k"], {})


def test_files_that_are_of_no_use(parse: Parse, authority: Authority, tmp_path: Path) -> None:
    pair, other = authority.issue("a"), authority.issue("b")
    none, locked, folder = tmp_path / "none.pem", tmp_path / "locked.key", tmp_path
    private = serialization.load_pem_private_key(pair.key.read_bytes(), None)
    password = serialization.BestAvailableEncryption(b"x")
    locked.write_bytes(private.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, password))
    for cert, key, ca, sentence in (
        (none, pair.key, authority.ca, f"--tls-cert {none} cannot be read: No such file or directory"),
        (pair.cert, none, authority.ca, f"--tls-key {none} cannot be read"),
        (pair.cert, folder, authority.ca, f"--tls-key {folder} cannot be read: Is a directory"),
        (pair.cert, other.key, authority.ca, "do not belong together: give a matching pair"),
        (pair.key, pair.key, authority.ca, "are not a certificate and its key in PEM"),
        (pair.cert, locked, authority.ca, f"--tls-key {locked} needs a password"),
        (pair.cert, pair.key, none, f"--tls-client-ca {none} cannot be read"),
        (pair.cert, pair.key, pair.key, f"--tls-client-ca {pair.key} holds no certificate in PEM"),
    ):
        flags = ["--tls-cert", str(cert), "--tls-key", str(key), "--tls-client-ca", str(ca)]
        with pytest.raises(SettingsError) as mistake:
            server_credentials(parse(flags, {}).tls)
        assert sentence in str(mistake.value)
        assert "\n" not in str(mistake.value)


def test_towards_executors(authority: Authority, tmp_path: Path) -> None:
    parse, read = tokenmill_scheduler.settings.parse_settings, channel_credentials
    pair, other = authority.issue("a"), authority.issue("b")
    ca, cert, key = "--executor-tls-ca", "--executor-tls-cert", "--executor-tls-key"
    assert parse([], {}).executor_tls is None
    for flags, sentence in (
        ([cert, "c"], "go together: give both, or neither"),
        ([cert, "c", key, "k"], "--executor-tls-cert needs --executor-tls-ca"),
        ([ca, str(tmp_path / "none")], "--executor-tls-ca .* cannot be read"),
        ([ca, str(pair.key)], "--executor-tls-ca .* holds no certificate in PEM"),
        ([ca, str(authority.ca), cert, str(pair.cert), key, str(other.key)], "--executor-tls-cert .* do not belong together"),
    ):
        with pytest.raises(SettingsError, match=sentence):
            read(parse(flags, {}).executor_tls)  # type: ignore[arg-type]  # never None behind these flags


@pytest.mark.parametrize(
    "flags",
    [
        ["--tls-cert", "none", "--tls-key", "none"],
        ["--executor-tls-ca", "none"],
        ["--auth-tokens", "none"],
        ["--max-tenant-requests", "0"],
        ["--max-prompt-tokens", "many"],
    ],
)
def test_the_scheduler_ends_with_2(flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--database", f"sqlite:///{tmp_path}/x.db", "--listen", "127.0.0.1:0", "--log-level", "error"]
    assert scheduler.main([*where, *flags]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"tokenmill_scheduler: {flags[0]} none cannot be read" if "none" in flags else "tokenmill_scheduler: ")
    assert said.count("\n") == 1


def test_the_executor_ends_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--model", "simulated", "--listen", "127.0.0.1:0", "--log-level", "error"]
    assert executor.main([*argv, "--tls-cert", "none", "--tls-key", "none"]) == 2
    assert capsys.readouterr().err.startswith("tokenmill_executor: --tls-cert none cannot be read")


@pytest.mark.parametrize(
    ("listen", "is_open"),
    [
        ("127.0.0.1:7600", False),
        ("127.9.9.9:1", False),
        ("[::1]:1", False),
        ("localhost:1", False),
        ("unix:/run/x.sock", False),
        ("0.0.0.0:1", True),
        ("[::]:1", True),
        ("10.0.0.1:1", True),
        ("scheduler.example:1", True),
    ],
)
def test_which_addresses_others_can_reach(listen: str, is_open: bool) -> None:
    assert address.is_open(listen) is is_open
