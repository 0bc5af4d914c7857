"""Who may call, from a TOML file of token digests that is read again when it changes. docs/security.md describes the file.

Tokens themselves are in no file and in no record here. Must not know: gRPC.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from math import inf
from pathlib import Path
from typing import Any

import structlog
from tokenmill_service.flags import SettingsError

from tokenmill_scheduler.core.quotas import Quota
from tokenmill_scheduler.tenants import OVER_QUOTA, TenantLimits

CHECK_INTERVAL_S = 2.0
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
# The keys of a tenant's table, in `TenantLimits` and in its `Quota`.
_LIMITS = ("max_requests", "max_queued_tokens")
_QUOTAS = ("max_num_seqs", "max_kv_blocks", "max_tokens_per_s")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class Role(StrEnum):
    CLIENT = "client"
    OPERATOR = "operator"


@dataclass(frozen=True, slots=True)
class Identity:
    """Who calls. `tenant` is the one whose requests alone it makes and sees; empty: of all tenants."""

    actor: str
    role: Role
    tenant: str = ""


# Everyone, where no tokens are asked for.
ANONYMOUS = Identity("anonymous", Role.OPERATOR)


@dataclass(frozen=True, slots=True)
class AccessList:
    """One reading of the file. `limits` has the tenants that differ from the rest."""

    identities: tuple[tuple[bytes, Identity], ...]
    limits: Mapping[str, TenantLimits]

    def identify(self, token: str) -> Identity | None:
        """Compares with every digest whatever it finds, so that the time taken tells nothing."""
        digest = hashlib.sha256(token.encode()).digest()
        found = None
        for known, identity in self.identities:
            if hmac.compare_digest(known, digest):
                found = identity
        return found


class Access:
    """The list in force. Without a file everyone is ANONYMOUS."""

    def __init__(self, path: Path | None, default_limits: TenantLimits) -> None:
        """Raises SettingsError."""
        self._path = path
        self._default_limits = default_limits
        self._seen = _stamp(path)
        self._list = None if path is None else read_access_list(path, default_limits)
        self._log = structlog.get_logger(__name__)

    @property
    def needs_token(self) -> bool:
        return self._list is not None

    def identify(self, token: str) -> Identity | None:
        return ANONYMOUS if self._list is None else self._list.identify(token)

    def limits(self, tenant: str) -> TenantLimits:
        return self._default_limits if self._list is None else self._list.limits.get(tenant, self._default_limits)

    def quotas(self) -> tuple[Quota, dict[str, Quota]]:
        """That of most tenants, and those of the tenants that have others."""
        limits = {} if self._list is None else self._list.limits
        return self._default_limits.quota, {tenant: its.quota for tenant, its in limits.items()}

    def weights(self) -> dict[str, float]:
        """Of the tenants whose fair share is not in proportion to 1."""
        limits = {} if self._list is None else self._list.limits
        return {tenant: its.weight for tenant, its in limits.items() if its.weight != 1}

    def refresh(self) -> bool:
        """Reads the file if it has changed; one with a mistake in it is logged, and the last right one stays in force.

        True when other things are in force now.
        """
        if self._path is None or (stamp := _stamp(self._path)) == self._seen:
            return False
        self._seen = stamp
        try:
            self._list = read_access_list(self._path, self._default_limits)
        except SettingsError as error:
            self._log.error("the tokens in force are those of before", reason=str(error))
            return False
        self._log.info("tokens read again", tokens=len(self._list.identities))
        return True

    async def watch(self, changed: Callable[[], None] = lambda: None) -> None:
        """Until cancelled; `changed` is called when other things are in force."""
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            if self.refresh():
                changed()


def read_access_list(path: Path, default_limits: TenantLimits) -> AccessList:
    """Raises SettingsError with the first mistake, never with what stands in place of a digest: it may be a token."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"--auth-tokens {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        # The error's own words may quote the file.
        raise SettingsError(f"--auth-tokens {path} is not TOML in UTF-8{_position(error)}") from None
    try:
        return _read_document(document, default_limits)
    except _Mistake as mistake:
        raise SettingsError(f"--auth-tokens {path}: {mistake}") from None


# ---- reading -------------------------------------------------------------------------------------------------------------------


class _Mistake(Exception):
    pass


def _read_document(document: Mapping[str, Any], default_limits: TenantLimits) -> AccessList:
    _check_keys(document, {"token", "tenant"}, "at the top")
    tokens, tenants = document.get("token", []), document.get("tenant", {})
    if not isinstance(tokens, list) or not all(isinstance(entry, dict) for entry in tokens):
        raise _Mistake("write each token as a table [[token]]")
    if not isinstance(tenants, dict):
        raise _Mistake("write each tenant's limits as a table [tenant.NAME]")
    identities = tuple(_read_token(entry, f"token {number}") for number, entry in enumerate(tokens, 1))
    _check_unique([identity.actor for _, identity in identities], "name")
    _check_unique([digest.hex() for digest, _ in identities], "sha256")
    return AccessList(identities, {name: _read_limits(name, table, default_limits) for name, table in tenants.items()})


def _read_token(entry: Mapping[str, Any], where: str) -> tuple[bytes, Identity]:
    _check_keys(entry, {"name", "role", "tenant", "sha256"}, f"in {where}")
    name = _read_name(entry.get("name"), f"{where}: name")
    if name == ANONYMOUS.actor:
        raise _Mistake(f"{where}: name {name} stands for callers without a token; choose another")
    role = entry.get("role")
    if role not in list(Role):
        raise _Mistake(f'{where} ({name}): role must be "client" or "operator"')
    if (role == Role.CLIENT) != ("tenant" in entry):
        raise _Mistake(f"{where} ({name}): a client needs a tenant, and an operator, who sees all tenants, has none")
    tenant = _read_name(entry["tenant"], f"{where} ({name}): tenant") if "tenant" in entry else ""
    sha256 = entry.get("sha256")
    if not isinstance(sha256, str) or not _SHA256.fullmatch(sha256):
        raise _Mistake(f"{where} ({name}): sha256 must be the 64 hex digits that `tokenmill auth hash` makes of the token")
    return bytes.fromhex(sha256), Identity(name, Role(role), tenant)


def _read_limits(name: str, table: Any, default: TenantLimits) -> TenantLimits:
    where = f"in [tenant.{_read_name(name, 'tenant')}]"
    if not isinstance(table, dict):
        raise _Mistake(f"{where}: write the limits as a table")
    _check_keys(table, {*_LIMITS, *_QUOTAS, "over_quota", "weight"}, where)
    weight = table.get("weight", default.weight)
    if type(weight) not in (int, float) or not 0 < weight < inf:
        raise _Mistake(f"{where}: weight must be a number above 0")
    over_quota = table.get("over_quota", OVER_QUOTA[default.quota.refuses])
    if over_quota not in OVER_QUOTA:
        raise _Mistake(f'{where}: over_quota must be "wait" or "refuse"')
    counts = {key: value for key, value in table.items() if key not in ("over_quota", "weight")}
    for key, value in counts.items():
        if type(value) is not int or value < 0:
            raise _Mistake(f"{where}: {key} must be a whole number of at least 0")
    quota = replace(default.quota, refuses=over_quota == "refuse", **{key: counts[key] for key in _QUOTAS if key in counts})
    return replace(default, quota=quota, weight=float(weight), **{key: counts[key] for key in _LIMITS if key in counts})


def _read_name(value: Any, what: str) -> str:
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise _Mistake(f"{what} must be 1 to 64 of letters, digits, '.', '_' and '-'")
    return value


def _check_keys(table: Mapping[str, Any], known: set[str], where: str) -> None:
    if unknown := sorted(set(table) - known):
        raise _Mistake(f"unknown key {unknown[0]!r} {where}: the known ones are {', '.join(sorted(known))}")


def _check_unique(values: list[str], key: str) -> None:
    if len(set(values)) < len(values):
        raise _Mistake(f"two tokens have one {key}: each needs its own")


def _position(error: ValueError) -> str:
    match = re.search(r"\(at (line \d+, column \d+)\)", str(error))
    return f" ({match[1]})" if match else ""


def _stamp(path: Path | None) -> tuple[int, ...]:
    """Differs when the file has been written or replaced."""
    try:
        found = path.stat() if path is not None else None
    except OSError:
        return ()
    return () if found is None else (found.st_ino, found.st_mtime_ns, found.st_size)
