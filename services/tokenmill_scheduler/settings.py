"""The scheduler's settings, from flags and environment variables (`flags.py`), validated once at start.

Must not know: gRPC, SQL. Whether the database and the executors can be reached shows when they are.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from tokenmill_service.address import check_address, check_metrics_address
from tokenmill_service.flags import FlagParser, SettingsError
from tokenmill_service.tls import ClientTls, ServerTls, server_tls

from tokenmill_scheduler.core.backlog import QueueLimits
from tokenmill_scheduler.core.overload import OverloadConfig
from tokenmill_scheduler.core.quotas import Quota
from tokenmill_scheduler.core.scheduler import SchedulerConfig
from tokenmill_scheduler.flags import DEFAULT_EXECUTOR, FLAGS
from tokenmill_scheduler.tenants import TenantLimits


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


def parser() -> FlagParser:
    """Of all flags."""
    return FlagParser(
        FLAGS,
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
