"""The scheduler's flags: of each its kind of value, default and meaning. Must not know: what becomes of the values.

A table, read as one, so it is as long as there are flags. `docs/settings.md` is made from it.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from tokenmill_service.flags import (
    LOG_FLAGS,
    METRICS_FLAGS,
    TLS_FLAGS,
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

from tokenmill_scheduler.core.admission import ADMISSION_MODES
from tokenmill_scheduler.core.lanes import LaneShares, parse_lane_shares
from tokenmill_scheduler.core.ordering import AGEING_TURN, MAX_PRIORITY_WAIT_S
from tokenmill_scheduler.core.policy import POLICIES
from tokenmill_scheduler.tenants import OVER_QUOTA

DEFAULT_LISTEN = "127.0.0.1:7600"
DEFAULT_EXECUTOR = "127.0.0.1:7601"


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


FLAGS: dict[str, dict[str, dict[str, Any]]] = {
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
            "default": 0.1,
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
            "default": 32,
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
            "help": "slots that each lane is guaranteed while it has work, in per cent; a lane that is not named keeps its default",
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
