"""The scheduler's settings: flags, each also an environment variable TOKENMILL_<FLAG>, validated once at start.

Must not know: gRPC, SQL. Whether the database and the executors can be reached shows when they are.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from tokenmill_service.address import check_address, check_metrics_address
from tokenmill_service.flags import (
    LOG_FLAGS,
    METRICS_FLAGS,
    TLS_FLAGS,
    FlagParser,
    SettingsError,
    count,
    count_or_zero,
    file,
    fraction,
    message_bytes,
    seconds,
    share,
    size_bytes,
    timeout,
)
from tokenmill_service.tls import ClientTls, ServerTls, server_tls

from tokenmill_scheduler.core.admission import ADMISSION_MODES
from tokenmill_scheduler.core.backlog import QueueLimits
from tokenmill_scheduler.core.lanes import LaneShares, parse_lane_shares
from tokenmill_scheduler.core.ordering import AGEING_TURN, MAX_PRIORITY_WAIT_S
from tokenmill_scheduler.core.overload import OverloadConfig
from tokenmill_scheduler.core.policy import POLICIES
from tokenmill_scheduler.core.quotas import Quota
from tokenmill_scheduler.core.scheduler import SchedulerConfig
from tokenmill_scheduler.tenants import OVER_QUOTA, TenantLimits

DEFAULT_LISTEN = "127.0.0.1:7600"
DEFAULT_EXECUTOR = "127.0.0.1:7601"


@dataclass(frozen=True, slots=True)
class Settings:
    """`durability` is "power" (a commit survives a power cut) or "process" (it survives the death of the process only).

    `tls` and `executor_tls` are None for plaintext; without `auth_tokens` everyone may call.
    """

    listen: str
    executors: tuple[str, ...]
    database: str
    durability: str
    commit_interval_s: float
    num_scheduler_steps: int
    scheduler_name: str
    lease_time_s: float
    scheduler: SchedulerConfig
    queue_limits: QueueLimits
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
    metrics_address: str
    port_file: Path | None
    plan_journal: Path | None
    plan_journal_bytes: int
    log_format: str
    log_level: str

    @property
    def is_alone(self) -> bool:
        """Whether the database takes one scheduler only."""
        return self.database.startswith("sqlite")


def parse_settings(argv: Sequence[str], environ: Mapping[str, str]) -> Settings:
    """Flags win over the environment. Raises SettingsError; `--help` prints and raises SystemExit."""
    values = parser().values(argv, environ)
    config = SchedulerConfig(
        max_num_seqs=values["max_num_seqs"],
        max_num_batched_tokens=values["max_num_batched_tokens"],
        batching=values["batching"],
        policy=values["policy"],
        ageing_turn=values["ageing_turn"],
        max_priority_wait_s=values["max_priority_wait"] or inf,
        lane_shares=values["lane_shares"],
        fair_share=values["fair_share"],
        max_waiting_time_s=values["max_waiting_time"],
        watermark=values["watermark"],
        max_executor_losses=values["max_executor_losses"],
        max_no_blocks=values["max_no_blocks"],
        admission=values["admission"],
        overload=_overload(values),
    )
    if config.max_num_batched_tokens < config.max_num_seqs:
        raise SettingsError(
            f"--max-num-batched-tokens {config.max_num_batched_tokens} is below --max-num-seqs {config.max_num_seqs}: "
            "a step has one token for every running sequence, so raise the one or lower the other"
        )
    return Settings(
        listen=check_address(values["listen"], "--listen"),
        executors=_executors(values.get("executor", [DEFAULT_EXECUTOR])),
        database=values["database"],
        durability=values["durability"],
        commit_interval_s=values["commit_interval"],
        num_scheduler_steps=values["num_scheduler_steps"],
        scheduler_name=values["scheduler_name"],
        lease_time_s=values["lease_time"],
        scheduler=config,
        queue_limits=QueueLimits(values["max_queue_len"], values["max_queue_tokens"]),
        step_timeout_s=values["step_timeout"],
        heartbeat_timeout_s=values["heartbeat_timeout"],
        grace_period_s=values["grace_period"],
        reattach_grace_s=values["reattach_grace"],
        idle_client_timeout_s=values["idle_client_timeout"],
        retention_s=values["retention"],
        max_message_bytes=values["max_message_bytes"],
        tls=server_tls(values),
        executor_tls=_executor_tls(values),
        auth_tokens=values["auth_tokens"],
        tenant_limits=_tenant_limits(values),
        max_prompt_tokens=values["max_prompt_tokens"],
        metrics_address=check_metrics_address(values["metrics_address"]),
        port_file=values["port_file"],
        plan_journal=values["plan_journal"],
        plan_journal_bytes=values["plan_journal_bytes"],
        log_format=values["log_format"],
        log_level=values["log_level"],
    )


def settings_from_process(argv: Sequence[str]) -> Settings:
    return parse_settings(argv, os.environ)


# ---- flags ---------------------------------------------------------------------------------------------------------------------


def parser() -> FlagParser:
    """Of all flags; `docs/settings.md` is made from it."""
    return FlagParser(
        _FLAGS,
        prog="python -m tokenmill_scheduler",
        description="Takes requests, keeps them, and batches them onto executors.",
        epilog="Each flag is also an environment variable: --max-num-seqs is TOKENMILL_MAX_NUM_SEQS; TOKENMILL_EXECUTOR takes "
        "several addresses with commas between them. A flag wins.",
    )


def _overload(values: Mapping[str, Any]) -> OverloadConfig:
    return OverloadConfig(
        enabled=values["overload_control"],
        ttft_target_s=values["ttft_target"],
        queue_delay_s=values["overload_queue_delay"],
        kv_pressure=values["overload_kv_pressure"],
        hold_s=values["overload_hold"],
        recovery_s=values["overload_recovery"],
    )


def _tenant_limits(values: Mapping[str, Any]) -> TenantLimits:
    quota = Quota(
        max_num_seqs=values["max_tenant_num_seqs"],
        max_kv_blocks=values["max_tenant_kv_blocks"],
        max_tokens_per_s=values["max_tenant_tokens_per_s"],
        refuses=values["tenant_over_quota"] == "refuse",
    )
    return TenantLimits(values["max_tenant_requests"], values["max_tenant_queued_tokens"], quota)


def _executors(addresses: Sequence[str]) -> tuple[str, ...]:
    for address in addresses:
        check_address(address, "--executor")
        if addresses.count(address) > 1:
            raise SettingsError(f"--executor {address} is given twice: name each executor once")
    return tuple(addresses)


def _executor_tls(values: Mapping[str, Any]) -> ClientTls | None:
    ca, cert, key = values["executor_tls_ca"], values["executor_tls_cert"], values["executor_tls_key"]
    if (cert is None) != (key is None):
        raise SettingsError("--executor-tls-cert and --executor-tls-key go together: give both, or neither")
    if ca is None and cert is not None:
        raise SettingsError("--executor-tls-cert needs --executor-tls-ca: give the authority of the executors' certificates")
    return None if ca is None else ClientTls(ca, cert, key)


def _name(text: str) -> str:
    """One that fits a log line and any database."""
    if len(text) > 200 or not text.isprintable():
        raise argparse.ArgumentTypeError("a name has at most 200 characters, all of them printable")
    return text


def _lane_shares(text: str) -> LaneShares:
    try:
        return parse_lane_shares(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _at_least_two(text: str) -> int:
    if (value := count(text)) < 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 2")
    return value


_FLAGS: dict[str, dict[str, dict[str, Any]]] = {
    "service": {
        "--listen": {"default": DEFAULT_LISTEN, "help": "HOST:PORT (port 0: any free one), or unix:PATH"},
        "--executor": {
            "action": "append",
            "default": argparse.SUPPRESS,
            "help": f"address of an executor; repeat for several (default: {DEFAULT_EXECUTOR})",
        },
        "--max-message-bytes": {
            "type": message_bytes,
            "default": "64MiB",
            "help": "largest message taken, from clients and executors",
        },
        "--grace-period": {"type": seconds, "default": 30.0, "help": "on SIGTERM, how long steps in hand may take, in seconds"},
        "--port-file": {"type": Path, "default": None, "help": "a file to write the address to, once listening"},
        "--plan-journal": {
            "type": file,
            "default": None,
            "help": "a file for every event, with prompts, and every decision, to `tokenmill replay`; gzipped if it ends in .gz",
        },
        "--plan-journal-bytes": {"type": size_bytes, "default": "1GiB", "help": "most bytes of the plan journal, before gzip"},
        **METRICS_FLAGS,
        **LOG_FLAGS,
    },
    "database": {
        "--database": {"default": "sqlite:///tokenmill.db", "help": "URL of the database that keeps requests and tokens"},
        "--durability": {
            "choices": ("power", "process"),
            "default": "power",
            "help": "what a commit survives: a power cut, or the death of the process only (faster)",
        },
        "--commit-interval": {
            "type": seconds,
            "default": 0.05,
            "help": "for how long a token may wait for others, of its stream (--num-scheduler-steps) and of other streams, to be "
            "committed and sent with them, in seconds; first tokens and ends never wait; 0: none does",
        },
        "--retention": {
            "type": seconds,
            "default": 604_800.0,
            "help": "ended requests are kept for this long, with their output, in seconds (7 days); 0: for ever",
        },
        "--scheduler-name": {
            "type": _name,
            "default": "",
            "help": "among the schedulers on one PostgreSQL, the same whenever it is started (default: its host and address)",
        },
        "--lease-time": {
            "type": timeout,
            "default": 10.0,
            "help": "a scheduler that stands still for longer is taken over by another on its PostgreSQL, in seconds",
        },
    },
    "batching": {
        "--max-num-seqs": {"type": count, "default": 64, "help": "most sequences in a step"},
        "--max-num-batched-tokens": {"type": count, "default": 512, "help": "most tokens in a step, prefill and decode together"},
        "--num-scheduler-steps": {
            "type": count,
            "default": 16,
            "help": "most steps that an executor may take on one plan while all it has is to decode and nothing happens, within "
            "--commit-interval; whatever happens is seen to after the step in progress. 1: a plan for each",
        },
        "--batching": {
            "choices": ("continuous", "static"),
            "default": "continuous",
            "help": "static runs each batch to its end",
        },
        "--max-waiting-time": {"type": seconds, "default": 0.05, "help": "how long a static batch waits to fill, in seconds"},
        "--policy": {"choices": POLICIES, "default": "fcfs", "help": "the order within a lane (docs/policies.md)"},
        "--fair-share": {
            "action": argparse.BooleanOptionalAction,
            "default": False,
            "help": "tenants share each lane's tokens by their weights; the policy orders the requests of each",
        },
        "--lane-shares": {
            "type": _lane_shares,
            "default": "real_time=50,standard=40,batch=10",
            "help": "slots that each lane is guaranteed while it has work, in per cent",
        },
        "--ageing-turn": {
            "type": count_or_zero,
            "default": AGEING_TURN,
            "help": "of so many admissions, where the policy lets later requests overtake, one is of the oldest request; 0: none",
        },
        "--max-priority-wait": {
            "type": seconds,
            "default": MAX_PRIORITY_WAIT_S,
            "help": "under policy priority, the order is strict until a request has waited for so long, in seconds; 0: for ever",
        },
        "--admission": {
            "choices": ADMISSION_MODES,
            "default": "optimistic",
            "help": "what KV blocks are booked for at first: what a request has, all it may come to, or what outputs were so far",
        },
        "--watermark": {"type": share, "default": 0.01, "help": "share of the KV blocks kept back for running sequences"},
    },
    "security": {
        **TLS_FLAGS,
        "--executor-tls-ca": {
            "type": file,
            "default": None,
            "help": "PEM file of the authority that signed the executors' certificates; turns on TLS towards them",
        },
        "--executor-tls-cert": {"type": file, "default": None, "help": "PEM file of the certificate to show to executors"},
        "--executor-tls-key": {"type": file, "default": None, "help": "PEM file of its private key"},
        "--auth-tokens": {
            "type": file,
            "default": None,
            "help": "TOML file of who may call (docs/security.md); without it everyone may",
        },
    },
    "overload": {
        "--overload-control": {
            "action": argparse.BooleanOptionalAction,
            "default": True,
            "help": "hold back the batch lane, then refuse the standard lane, while there is too much work",
        },
        "--ttft-target": {
            "type": timeout,
            "default": 2.0,
            "help": "time to first token of real-time requests; there is too much work when one waits half of it, in seconds",
        },
        "--overload-queue-delay": {
            "type": timeout,
            "default": 60.0,
            "help": "there is too much work when a standard request waits so long, in seconds",
        },
        "--overload-kv-pressure": {
            "type": fraction,
            "default": 0.95,
            "help": "there is too much batch work when so much of the KV cache is promised and others wait",
        },
        "--overload-hold": {"type": seconds, "default": 2.0, "help": "how long that lasts before more is held back, in seconds"},
        "--overload-recovery": {
            "type": timeout,
            "default": 5.0,
            "help": "how long it is over before less is held back, in seconds",
        },
    },
    "limits": {
        "--max-prompt-tokens": {"type": count, "default": None, "help": "most tokens of a prompt; without it, the model's limit"},
        "--max-tenant-requests": {"type": count, "default": None, "help": "most requests of a tenant, queued and running"},
        "--max-tenant-queued-tokens": {
            "type": count,
            "default": None,
            "help": "most tokens of a tenant's queued requests, prompts and the output they may make",
        },
        "--max-tenant-num-seqs": {"type": count, "default": None, "help": "most sequences of a tenant running"},
        "--max-tenant-kv-blocks": {
            "type": count,
            "default": None,
            "help": "most KV blocks that a tenant's running sequences may come to",
        },
        "--max-tenant-tokens-per-s": {
            "type": count,
            "default": None,
            "help": "most tokens a second of a tenant, prompts and output; a request runs while there are any left",
        },
        "--tenant-over-quota": {
            "choices": OVER_QUOTA,
            "default": "wait",
            "help": "what becomes of a request that its tenant's sequences, blocks or tokens a second do not allow to run",
        },
        "--max-queue-len": {"type": count, "default": 10_000, "help": "most requests waiting"},
        "--max-queue-tokens": {
            "type": count,
            "default": None,
            "help": "most tokens of requests waiting, prompts and the output they may make",
        },
        "--step-timeout": {"type": timeout, "default": 60.0, "help": "an executor is lost when a step takes longer, in seconds"},
        "--heartbeat-timeout": {
            "type": timeout,
            "default": 10.0,
            "help": "an executor is lost when silent longer, in seconds",
        },
        "--reattach-grace": {
            "type": seconds,
            "default": 30.0,
            "help": "a request that is not detached is cancelled when no client reads it for this long after a restart, in seconds",
        },
        "--max-executor-losses": {
            "type": _at_least_two,
            "default": 2,
            "help": "a request fails when so many executors were lost while they ran it, alone under suspicion after the first",
        },
        "--max-no-blocks": {
            "type": count,
            "default": 16,
            "help": "a request fails when executors have so often in a row had no KV block for it though they had reported enough",
        },
        "--idle-client-timeout": {
            "type": seconds,
            "default": 300.0,
            "help": "a request that is not detached expires when its client is there and reads nothing for this long, in seconds; "
            "0: never",
        },
    },
}
