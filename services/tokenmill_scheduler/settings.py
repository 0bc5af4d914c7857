"""The scheduler's settings: flags, each also an environment variable TOKENMILL_<FLAG>, validated once at start.

Must not know: gRPC, SQL. Whether the database and the executors can be reached shows when they are.
"""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from tokenmill_scheduler.core.policy import POLICIES
from tokenmill_scheduler.core.scheduler import SchedulerConfig
from tokenmill_scheduler.tenants import TenantLimits

DEFAULT_LISTEN = "127.0.0.1:7600"
DEFAULT_EXECUTOR = "127.0.0.1:7601"
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


class SettingsError(Exception):
    """An operator's mistake; the text is one sentence that says what to do."""


@dataclass(frozen=True, slots=True)
class ServerTls:
    """Paths of PEM files. With `client_ca`, clients must show a certificate that it has signed (mutual TLS)."""

    cert: Path
    key: Path
    client_ca: Path | None


@dataclass(frozen=True, slots=True)
class ClientTls:
    """Paths of PEM files for calls to executors: the authority that signed their certificates, and a certificate to show."""

    ca: Path
    cert: Path | None
    key: Path | None


@dataclass(frozen=True, slots=True)
class Settings:
    """`durability` is "power" (a commit survives a power cut) or "process" (it survives the death of the process only).

    `tls` and `executor_tls` are None for plaintext; without `auth_tokens` everyone may call.
    """

    listen: str
    executors: tuple[str, ...]
    database: str
    durability: str
    scheduler_name: str
    lease_time_s: float
    scheduler: SchedulerConfig
    max_queue_len: int
    step_timeout_s: float
    heartbeat_timeout_s: float
    grace_period_s: float
    reattach_grace_s: float
    idle_client_timeout_s: float
    retention_s: float
    max_message_bytes: int
    tls: ServerTls | None
    executor_tls: ClientTls | None
    auth_tokens: Path | None
    tenant_limits: TenantLimits
    max_prompt_tokens: int | None
    port_file: Path | None
    log_format: str
    log_level: str

    @property
    def is_alone(self) -> bool:
        """Whether the database takes one scheduler only."""
        return self.database.startswith("sqlite")


def parse_settings(argv: Sequence[str], environ: Mapping[str, str]) -> Settings:
    """Flags win over the environment. Raises SettingsError; `--help` prints and raises SystemExit."""
    flags = parser()
    values = vars(flags.parse_args([*_environment_flags(flags, argv, environ), *argv]))
    config = SchedulerConfig(
        max_num_seqs=values["max_num_seqs"],
        max_num_batched_tokens=values["max_num_batched_tokens"],
        batching=values["batching"],
        policy=values["policy"],
        max_waiting_time_s=values["max_waiting_time"],
        watermark=values["watermark"],
        max_executor_losses=values["max_executor_losses"],
    )
    if config.max_num_batched_tokens < config.max_num_seqs:
        raise SettingsError(
            f"--max-num-batched-tokens {config.max_num_batched_tokens} is below --max-num-seqs {config.max_num_seqs}: "
            "a step has one token for every running sequence, so raise the one or lower the other"
        )
    return Settings(
        listen=_address(values["listen"], "--listen"),
        executors=_executors(values.get("executor", [DEFAULT_EXECUTOR])),
        database=values["database"],
        durability=values["durability"],
        scheduler_name=values["scheduler_name"],
        lease_time_s=values["lease_time"],
        scheduler=config,
        max_queue_len=values["max_queue_len"],
        step_timeout_s=values["step_timeout"],
        heartbeat_timeout_s=values["heartbeat_timeout"],
        grace_period_s=values["grace_period"],
        reattach_grace_s=values["reattach_grace"],
        idle_client_timeout_s=values["idle_client_timeout"],
        retention_s=values["retention"],
        max_message_bytes=values["max_message_bytes"],
        tls=_server_tls(values),
        executor_tls=_executor_tls(values),
        auth_tokens=values["auth_tokens"],
        tenant_limits=TenantLimits(values["max_tenant_requests"], values["max_tenant_queued_tokens"]),
        max_prompt_tokens=values["max_prompt_tokens"],
        port_file=values["port_file"],
        log_format=values["log_format"],
        log_level=values["log_level"],
    )


def settings_from_process(argv: Sequence[str]) -> Settings:
    return parse_settings(argv, os.environ)


# ---- flags ---------------------------------------------------------------------------------------------------------------------


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None else super()._get_help_string(action)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SettingsError(message)


def parser() -> argparse.ArgumentParser:
    """Of all flags; `docs/settings.md` is made from it."""
    parser = _Parser(
        prog="python -m tokenmill_scheduler",
        description="Takes requests, keeps them, and batches them onto executors.",
        epilog="Each flag is also an environment variable: --max-num-seqs is TOKENMILL_MAX_NUM_SEQS; TOKENMILL_EXECUTOR takes "
        "several addresses with commas between them. A flag wins.",
        formatter_class=_HelpFormatter,
        allow_abbrev=False,
    )
    for group, flags in _FLAGS.items():
        section = parser.add_argument_group(group)
        for flag, options in flags.items():
            section.add_argument(flag, **options)
    return parser


def _environment_flags(parser: argparse.ArgumentParser, argv: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    given = {argument.partition("=")[0] for argument in argv}
    flags = []
    for action in parser._actions:
        value = environ.get(f"TOKENMILL_{action.dest.upper()}")
        flag = action.option_strings[-1]
        # One that is given is left out, because flags that can be repeated would add up.
        if value is not None and flag not in given:
            values = value.split(",") if isinstance(action, argparse._AppendAction) else [value]
            flags += [f"{flag}={part.strip()}" for part in values]
    return flags


def _address(address: str, flag: str) -> str:
    if address.startswith("unix:"):
        if address == "unix:":
            raise SettingsError(f"{flag} unix: needs a path behind it, such as unix:/run/tokenmill/scheduler.sock")
    elif not (match := re.fullmatch(r".+:(\d{1,5})", address)) or int(match[1]) > 65535:
        raise SettingsError(f"{flag} {address} is neither HOST:PORT nor unix:PATH")
    return address


def _executors(addresses: Sequence[str]) -> tuple[str, ...]:
    for address in addresses:
        _address(address, "--executor")
        if addresses.count(address) > 1:
            raise SettingsError(f"--executor {address} is given twice: name each executor once")
    return tuple(addresses)


def _server_tls(values: Mapping[str, Any]) -> ServerTls | None:
    cert, key, client_ca = values["tls_cert"], values["tls_key"], values["tls_client_ca"]
    if cert is None and key is None and client_ca is None:
        return None
    if cert is None or key is None:
        raise SettingsError("--tls-cert and --tls-key are needed for TLS, one is missing: give a certificate and its private key")
    if values["listen"].startswith("unix:"):
        raise SettingsError("--tls-cert is of no use on a unix socket, which its file's permissions guard: leave it out")
    return ServerTls(cert, key, client_ca)


def _executor_tls(values: Mapping[str, Any]) -> ClientTls | None:
    ca, cert, key = values["executor_tls_ca"], values["executor_tls_cert"], values["executor_tls_key"]
    if (cert is None) != (key is None):
        raise SettingsError("--executor-tls-cert and --executor-tls-key go together: give both, or neither")
    if ca is None and cert is not None:
        raise SettingsError("--executor-tls-cert needs --executor-tls-ca: give the authority of the executors' certificates")
    return None if ca is None else ClientTls(ca, cert, key)


def _file(text: str) -> Path | None:
    """Empty: none, which takes back what the environment says."""
    return Path(text) if text else None


def _name(text: str) -> str:
    """One that fits a log line and any database."""
    if len(text) > 200 or not text.isprintable():
        raise argparse.ArgumentTypeError("a name has at most 200 characters, all of them printable")
    return text


def _count(text: str) -> int:
    """argparse quotes the function's message, not its name."""
    if not re.fullmatch(r"\d+", text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _at_least_two(text: str) -> int:
    if (value := _count(text)) < 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 2")
    return value


def _duration(text: str) -> float:
    value = _number(text)
    if not 0 <= value < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds of at least 0")
    return value


def _timeout(text: str) -> float:
    if (value := _duration(text)) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value


def _share(text: str) -> float:
    if not 0 <= (value := _number(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not at least 0 and below 1")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?i?B?)", text.strip(), re.IGNORECASE)
    if match is None or match[2].upper() not in _UNITS or (size := int(float(match[1]) * _UNITS[match[2].upper()])) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 64MiB")
    if size >= 1 << 31:
        raise argparse.ArgumentTypeError(f"{text!r} is more than gRPC can carry in one message, 2GiB")
    return size


_FLAGS: dict[str, dict[str, dict[str, Any]]] = {
    "service": {
        "--listen": {"default": DEFAULT_LISTEN, "help": "HOST:PORT (port 0: any free one), or unix:PATH"},
        "--executor": {
            "action": "append",
            "default": argparse.SUPPRESS,
            "help": f"address of an executor; repeat for several (default: {DEFAULT_EXECUTOR})",
        },
        "--max-message-bytes": {"type": _bytes, "default": "64MiB", "help": "largest message taken, from clients and executors"},
        "--grace-period": {"type": _duration, "default": 30.0, "help": "on SIGTERM, how long steps in hand may take, in seconds"},
        "--port-file": {"type": Path, "default": None, "help": "a file to write the address to, once listening"},
        "--log-format": {"choices": ("console", "json"), "default": "console", "help": "of the log on standard error"},
        "--log-level": {"choices": ("debug", "info", "warning", "error"), "default": "info", "help": "least level logged"},
    },
    "database": {
        "--database": {"default": "sqlite:///tokenmill.db", "help": "URL of the database that keeps requests and tokens"},
        "--durability": {
            "choices": ("power", "process"),
            "default": "power",
            "help": "what a commit survives: a power cut, or the death of the process only (faster)",
        },
        "--retention": {
            "type": _duration,
            "default": 604_800.0,
            "help": "ended requests are kept for this long, with their output, in seconds (7 days); 0: for ever",
        },
        "--scheduler-name": {
            "type": _name,
            "default": "",
            "help": "among the schedulers on one PostgreSQL, the same whenever it is started (default: its host and address)",
        },
        "--lease-time": {
            "type": _timeout,
            "default": 10.0,
            "help": "a scheduler that stands still for longer is taken over by another on its PostgreSQL, in seconds",
        },
    },
    "batching": {
        "--max-num-seqs": {"type": _count, "default": 64, "help": "most sequences in a step"},
        "--max-num-batched-tokens": {"type": _count, "default": 512, "help": "most tokens in a step, prefill and decode together"},
        "--batching": {
            "choices": ("continuous", "static"),
            "default": "continuous",
            "help": "static runs each batch to its end",
        },
        "--max-waiting-time": {"type": _duration, "default": 0.05, "help": "how long a static batch waits to fill, in seconds"},
        "--policy": {"choices": tuple(POLICIES), "default": "fcfs", "help": "the order of the queue"},
        "--watermark": {"type": _share, "default": 0.01, "help": "share of the KV blocks kept back for running sequences"},
    },
    "security": {
        "--tls-cert": {"type": _file, "default": None, "help": "PEM file of the certificate to serve with; turns on TLS"},
        "--tls-key": {"type": _file, "default": None, "help": "PEM file of its private key"},
        "--tls-client-ca": {
            "type": _file,
            "default": None,
            "help": "PEM file of the authority whose certificates clients must show (mutual TLS)",
        },
        "--executor-tls-ca": {
            "type": _file,
            "default": None,
            "help": "PEM file of the authority that signed the executors' certificates; turns on TLS towards them",
        },
        "--executor-tls-cert": {"type": _file, "default": None, "help": "PEM file of the certificate to show to executors"},
        "--executor-tls-key": {"type": _file, "default": None, "help": "PEM file of its private key"},
        "--auth-tokens": {
            "type": _file,
            "default": None,
            "help": "TOML file of who may call (docs/security.md); without it everyone may",
        },
    },
    "limits": {
        "--max-prompt-tokens": {"type": _count, "default": None, "help": "most tokens of a prompt; without it, the model's limit"},
        "--max-tenant-requests": {"type": _count, "default": None, "help": "most requests of a tenant, queued and running"},
        "--max-tenant-queued-tokens": {
            "type": _count,
            "default": None,
            "help": "most tokens of a tenant's queued requests, prompts and the output they may make",
        },
        "--max-queue-len": {"type": _count, "default": 10_000, "help": "most requests waiting"},
        "--step-timeout": {"type": _timeout, "default": 60.0, "help": "an executor is lost when a step takes longer, in seconds"},
        "--heartbeat-timeout": {
            "type": _timeout,
            "default": 10.0,
            "help": "an executor is lost when silent longer, in seconds",
        },
        "--reattach-grace": {
            "type": _duration,
            "default": 30.0,
            "help": "a request that is not detached is cancelled when no client reads it for this long after a restart, in seconds",
        },
        "--max-executor-losses": {
            "type": _at_least_two,
            "default": 2,
            "help": "a request fails when so many executors were lost while they ran it, alone under suspicion after the first",
        },
        "--idle-client-timeout": {
            "type": _duration,
            "default": 300.0,
            "help": "a request that is not detached expires when its client is there and reads nothing for this long, in seconds; "
            "0: never",
        },
    },
}
