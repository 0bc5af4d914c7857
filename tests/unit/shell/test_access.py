"""The file of tokens: what it may say, and that a mistake gets a sentence without the token in it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from structlog.testing import capture_logs
from tokenmill_cli.main import cli
from tokenmill_scheduler.access import ANONYMOUS, Access, Identity, Role, read_access_list
from tokenmill_scheduler.core.quotas import Quota
from tokenmill_scheduler.tenants import TenantLimits
from tokenmill_service.flags import SettingsError

DOCUMENT = Path(__file__).parents[3] / "docs" / "security.md"
DEFAULTS = TenantLimits(max_requests=10)
DIGEST = hashlib.sha256(b"tm-right").hexdigest()
OTHER = hashlib.sha256(b"tm-other").hexdigest()


def entry(**changes: str) -> str:
    fields = {"name": '"a"', "role": '"client"', "tenant": '"t"', "sha256": f'"{DIGEST}"'} | changes
    return "[[token]]\n" + "".join(f"{key} = {value}\n" for key, value in fields.items() if value)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tokens.toml"


def test_tokens_and_limits(path: Path) -> None:
    operator = entry(name='"o"', role='"operator"', tenant="", sha256=f'"{OTHER}"')
    path.write_text(entry() + operator + "[tenant.t]\nmax_queued_tokens = 5\n[tenant.u]\nmax_requests = 0\n")
    access = Access(path, DEFAULTS)
    assert access.needs_token
    assert access.identify("tm-right") == Identity("a", Role.CLIENT, "t")
    assert access.identify("tm-other") == Identity("o", Role.OPERATOR)
    assert access.identify("tm-wrong") is None
    assert access.identify("") is None
    assert access.limits("t") == TenantLimits(10, 5)
    assert access.limits("u") == TenantLimits(0, None)
    assert access.limits("v") == DEFAULTS


def test_without_a_file_everyone_is_anonymous() -> None:
    access = Access(None, DEFAULTS)
    assert not access.needs_token
    assert access.identify("whatever") is ANONYMOUS
    assert access.limits("t") == DEFAULTS


def test_an_empty_file_lets_nobody_in(path: Path) -> None:
    path.write_text("")
    access = Access(path, DEFAULTS)
    assert access.needs_token
    assert access.identify("") is None


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[[token]]\nsha256 = tm-secret", "is not TOML in UTF-8 (line 2, column 10)"),
        (entry(sha256='"tm-secret"'), "token 1 (a): sha256 must be the 64 hex digits that `tokenmill auth hash` makes"),
        (entry(sha256="5"), "sha256 must be the 64 hex digits"),
        (entry(sha256=""), "sha256 must be the 64 hex digits"),
        (entry(name=""), "token 1: name must be 1 to 64 of letters"),
        (entry(name='"a b"'), "token 1: name must be 1 to 64 of letters"),
        (entry(name='"anonymous"'), "name anonymous stands for callers without a token"),
        (entry(role='"admin"'), 'token 1 (a): role must be "client" or "operator"'),
        (entry(role="1"), 'role must be "client" or "operator"'),
        (entry(tenant=""), "a client needs a tenant, and an operator, who sees all tenants, has none"),
        (entry(role='"operator"'), "a client needs a tenant, and an operator, who sees all tenants, has none"),
        (entry(tenant='"a/b"'), "token 1 (a): tenant must be 1 to 64 of letters"),
        (entry(token='"tm-secret"'), "unknown key 'token' in token 1: the known ones are name, role, sha256, tenant"),
        (entry() + entry(name='"b"'), "two tokens have one sha256"),
        (entry() + entry(sha256=f'"{OTHER}"'), "two tokens have one name"),
        ("token = 5", "write each token as a table [[token]]"),
        ("[token]\nname = 'x'", "write each token as a table [[token]]"),
        ("[tokens]", "unknown key 'tokens' at the top: the known ones are tenant, token"),
        ("tenant = 5", "write each tenant's limits as a table [tenant.NAME]"),
        ("[tenant]\nt = 5", "in [tenant.t]: write the limits as a table"),
        ("[tenant.t]\nmax_requests = -1", "in [tenant.t]: max_requests must be a whole number of at least 0"),
        ("[tenant.t]\nmax_requests = true", "max_requests must be a whole number"),
        ("[tenant.t]\nmax = 1", "unknown key 'max' in [tenant.t]: the known ones are max_kv_blocks, max_num_seqs, max_"),
        ("[tenant.t]\nmax_kv_blocks = 1.5", "in [tenant.t]: max_kv_blocks must be a whole number of at least 0"),
        ("[tenant.t]\nover_quota = 'drop'", 'in [tenant.t]: over_quota must be "wait" or "refuse"'),
        ("[tenant.'a b']\n", "tenant must be 1 to 64 of letters"),
    ],
)
def test_a_mistake_gets_a_sentence(path: Path, text: str, sentence: str) -> None:
    path.write_text(text)
    with pytest.raises(SettingsError) as mistake:
        read_access_list(path, DEFAULTS)
    said = str(mistake.value)
    assert said.startswith(f"--auth-tokens {path}")
    assert sentence in said
    assert "secret" not in said
    assert "\n" not in said


def test_a_file_that_cannot_be_read(path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot be read: No such file"):
        Access(path, DEFAULTS)
    path.write_bytes(b"\xff")
    with pytest.raises(SettingsError, match=r"is not TOML in UTF-8$"):
        Access(path, DEFAULTS)


def test_a_change_is_read_once_and_a_mistake_changes_nothing(path: Path) -> None:
    path.write_text(entry())
    access = Access(path, DEFAULTS)
    with capture_logs() as logs:
        access.refresh()
        path.write_text(entry(sha256=f'"{OTHER}"') + "[tenant.t]\nmax_requests = 1\n")
        access.refresh()
        access.refresh()
        assert (access.identify("tm-right"), access.limits("t").max_requests) == (None, 1)
        for trouble in (lambda: path.write_text("tm-secret"), path.unlink):
            trouble()
            access.refresh()
            access.refresh()
            assert access.identify("tm-other") is not None
    assert [entry["event"] for entry in logs] == ["tokens read again", *["the tokens in force are those of before"] * 2]
    assert "secret" not in str(logs)


def test_the_documents_example_is_right(path: Path) -> None:
    example = DOCUMENT.read_text().partition("```toml\n")[2].partition("```")[0]
    path.write_text(example.replace("…", DIGEST, 1).replace("…", OTHER, 1))
    access = Access(path, DEFAULTS)
    assert access.identify("tm-right") == Identity("search-prod", Role.CLIENT, "search")
    quota = Quota(max_num_seqs=32, max_kv_blocks=4000, max_tokens_per_s=20_000)
    assert access.limits("search") == TenantLimits(500, 2_000_000, quota, weight=2.0)
    assert access.weights() == {"search": 2.0}


@pytest.mark.parametrize("weight", ["0", "-1", "inf", "nan", "true", '"2"'])
def test_a_weight_is_a_number_above_0(path: Path, weight: str) -> None:
    path.write_text(f"[tenant.apple]\nweight = {weight}\n")
    with pytest.raises(SettingsError, match="weight must be a number above 0"):
        Access(path, DEFAULTS)


# ---- tokenmill auth ------------------------------------------------------------------------------------------------------------


def test_what_auth_create_writes_is_an_entry_for_the_token_it_tells(path: Path) -> None:
    told = []
    for argv in (["ann", "--tenant", "apple"], ["olga", "--operator"]):
        result = CliRunner().invoke(cli, ["auth", "create", *argv])
        with path.open("a") as file:
            file.write(result.stdout)
        told.append(result.stderr.split()[-1])
    access = Access(path, DEFAULTS)
    assert access.identify(told[0]) == Identity("ann", Role.CLIENT, "apple")
    assert access.identify(told[1]) == Identity("olga", Role.OPERATOR)
    assert all(len(token) > 40 and token not in path.read_text() for token in told)


def test_auth_create_wants_a_tenant_or_an_operator() -> None:
    for argv in ([], ["--operator", "--tenant", "t"]):
        result = CliRunner().invoke(cli, ["auth", "create", "ann", *argv])
        assert (result.exit_code, "either --tenant or --operator" in result.stderr) == (2, True)


def test_auth_hash_reads_a_token() -> None:
    assert CliRunner().invoke(cli, ["auth", "hash"], input="tm-right\n").stdout == f"{DIGEST}\n"
    assert CliRunner().invoke(cli, ["auth", "hash"], input=" \n").exit_code == 2


def test_auth_create_as_json() -> None:
    document = json.loads(CliRunner().invoke(cli, ["auth", "create", "ann", "--tenant", "t", "--json"]).stdout)
    digest = hashlib.sha256(document["token"].encode()).hexdigest()
    assert document["entry"] == {"name": "ann", "role": "client", "tenant": "t", "sha256": digest}
