"""How much each tenant uses of the engine, and how much it may: slots, KV blocks, tokens per second.

A tenant at its quota is passed over: its requests wait and others run. Every change is a step of constant time. KV blocks are
counted as the most that a sequence can come to, until the executor has let go of them, so a quota is never exceeded and costs
nobody a preemption; blocks that sequences share through the prefix cache count for each.

Tokens are counted by a token bucket (Turner, "New directions in communications", 1986) of one second: known tokens as a request is
first admitted, output as it comes. A request is admitted while there is anything in it, so it can go into debt by what is admitted
and what runs, and the tenant then waits until that is paid. Must not know: queues, executors, why a sequence leaves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from math import inf

from tokenmill_scheduler.core.alarms import Alarms

BURST_S = 1.0
_SLACK = 64


@dataclass(frozen=True, slots=True)
class Quota:
    """The most that one tenant may use at a time; None: no limit. `refuses`: its requests over quota are refused at submit."""

    max_num_seqs: int | None = None
    max_kv_blocks: int | None = None
    max_tokens_per_s: int | None = None
    refuses: bool = False


@dataclass(slots=True)
class _Usage:
    """`tokens` are in the bucket since `at_s`; below 0: in debt."""

    num_seqs: int = 0
    kv_blocks: int = 0
    tokens: float = 0.0
    at_s: float = -inf


@dataclass(slots=True)
class _Held:
    tenant: str
    blocks: int
    runs: bool = True


@dataclass(slots=True)
class Quotas:
    """`default` is for tenants that `tenants` does not name. Sequences are known by their number."""

    default: Quota = field(default_factory=Quota)
    tenants: Mapping[str, Quota] = field(default_factory=dict)
    _usage: dict[str, _Usage] = field(default_factory=dict)
    _held: dict[int, _Held] = field(default_factory=dict)
    # Tenants that were found over their quota, the latest last, and until when they are or were; inf: until something changes.
    _limited: dict[str, float] = field(default_factory=dict)
    _refills: Alarms = field(default_factory=Alarms)
    _any_rate: bool = False
    _sweep_at: int = _SLACK

    def change(self, default: Quota, tenants: Mapping[str, Quota], now_s: float) -> None:
        """From now on; what is in use stays in use."""
        self.default, self.tenants = default, tenants
        for tenant in self._limited:
            self._let_go(tenant, now_s)
        self._any_rate = any(quota.max_tokens_per_s is not None for quota in (default, *tenants.values()))

    def of(self, tenant: str) -> Quota:
        return self.tenants.get(tenant, self.default)

    # ---- questions ----

    def over(self, tenant: str, num_seqs: int, most_blocks: int, now_s: float, waiting: int = 0) -> str:
        """Which quota so many more sequences, of so many blocks in all, would exceed, in a few words; empty: none.

        `waiting` sequences of the tenant are before them.
        """
        quota = self.of(tenant)
        usage = self._usage.get(tenant) or _Usage()
        if quota.max_num_seqs is not None and usage.num_seqs + waiting + num_seqs > quota.max_num_seqs:
            words = f"tenant {tenant} has {usage.num_seqs} of {quota.max_num_seqs} sequences running"
            return f"{words}, and {waiting} waiting" if waiting else words
        if quota.max_kv_blocks is not None and usage.kv_blocks + most_blocks > quota.max_kv_blocks:
            words = f"tenant {tenant} may hold {quota.max_kv_blocks} KV blocks"
            return f"{words}: those of it that run may come to {usage.kv_blocks}, and this to {most_blocks}"
        if self.ready_s(tenant, now_s) > now_s:
            return f"tenant {tenant} has used up its {quota.max_tokens_per_s} tokens per second"
        return ""

    def ready_s(self, tenant: str, now_s: float) -> float:
        """When the tenant has tokens to use again; `now_s` if it has."""
        rate = self.of(tenant).max_tokens_per_s
        if rate is None or (level := _level(self._usage.get(tenant) or _Usage(), rate, now_s)) > 0:
            return now_s
        # One token, so that there is something in it whatever the rounding; a rate of 0 is never ready.
        return now_s + (1 - level) / rate if rate else inf

    def in_use(self, tenant: str) -> tuple[int, int]:
        """Sequences running, and the most KV blocks that those here may come to."""
        usage = self._usage.get(tenant) or _Usage()
        return usage.num_seqs, usage.kv_blocks

    @property
    def next_refill_s(self) -> float | None:
        """When a tenant that was passed over for want of tokens first has some again."""
        earliest = self._refills.earliest()
        return earliest[0] if earliest else None

    # ---- what happens ----

    def refilled(self, now_s: float) -> None:
        """A plan is made that looks at all tenants anew."""
        while (earliest := self._refills.earliest()) and earliest[0] <= now_s:
            self._refills.discard(earliest[1])

    def limited_until_s(self, tenant: str, now_s: float) -> float:
        """Until when a quota keeps, or last kept, the tenant waiting; inf: until something changes, -inf: none did of late.

        As the last plan that looked at it found, or as its next sequence would be found now, however small.
        """
        if self._limited.get(tenant, now_s) <= now_s and self.over(tenant, 1, 0, now_s):
            self._limit(tenant, now_s)
        return self._limited.get(tenant, -inf)

    def passed_over(self, tenant: str, now_s: float) -> None:
        """By a plan, for its quota."""
        ready_s = self._limit(tenant, now_s)
        if now_s < ready_s < inf:
            self._refills.set(tenant, ready_s, 0)

    def _limit(self, tenant: str, now_s: float) -> float:
        """When it has tokens to use; `now_s`: it lacks something else."""
        ready_s = self.ready_s(tenant, now_s)
        self._limited.pop(tenant, None)
        if len(self._limited) > self._sweep_at:
            # Those that still want something are found again and again.
            self._limited = dict(islice(self._limited.items(), len(self._limited) // 2, None))
        self._limited[tenant] = ready_s if ready_s > now_s else inf
        return ready_s

    def admitted(self, sequence_id: int, tenant: str, most_blocks: int, now_s: float) -> None:
        usage = self._usage.setdefault(tenant, _Usage())
        usage.num_seqs += 1
        usage.kv_blocks += most_blocks
        self._held[sequence_id] = _Held(tenant, most_blocks)
        self._let_go(tenant, now_s)

    def spent(self, tenant: str, tokens: int, now_s: float) -> None:
        rate = self.of(tenant).max_tokens_per_s if self._any_rate else None
        if rate is not None:
            usage = self._usage.setdefault(tenant, _Usage())
            usage.tokens, usage.at_s = _level(usage, rate, now_s) - tokens, now_s

    @property
    def counts_tokens(self) -> bool:
        """Whether anybody's are limited: where not, `spent` need not be told."""
        return self._any_rate

    def stopped(self, sequence_id: int, now_s: float) -> None:
        """It runs no more; its blocks are on their way back."""
        held = self._held[sequence_id]
        self._let_go(held.tenant, now_s)
        if held.runs:
            held.runs = False
            self._usage[held.tenant].num_seqs -= 1

    def freed(self, sequence_id: int, now_s: float) -> None:
        """The executor holds no block of it any more."""
        self.stopped(sequence_id, now_s)
        held = self._held.pop(sequence_id)
        self._usage[held.tenant].kv_blocks -= held.blocks
        if len(self._usage) > self._sweep_at:
            self._sweep(now_s)

    def _let_go(self, tenant: str, now_s: float) -> None:
        """Whether it is within its quota now, the next look will tell."""
        if self._limited.get(tenant, now_s) > now_s:
            self._limited[tenant] = now_s

    def _sweep(self, now_s: float) -> None:
        """Forgets tenants that use nothing: names are many over the years."""
        for tenant in [tenant for tenant, usage in self._usage.items() if self._is_idle(tenant, usage, now_s)]:
            del self._usage[tenant]
        self._sweep_at = 2 * len(self._usage) + _SLACK

    def _is_idle(self, tenant: str, usage: _Usage, now_s: float) -> bool:
        rate = self.of(tenant).max_tokens_per_s
        return usage.num_seqs == usage.kv_blocks == 0 and (rate is None or _level(usage, rate, now_s) >= rate * BURST_S)


def _level(usage: _Usage, rate: int, now_s: float) -> float:
    """Tokens in the bucket at `now_s`; a new one is full."""
    return min(rate * BURST_S, usage.tokens + (now_s - usage.at_s) * rate if rate else usage.tokens)


class QuotaCheck:
    """One plan's look at the quotas. A tenant found over one is to be passed over in the rest of the plan: nobody of it runs sooner
    than who was before it, and it costs one look whatever it has queued."""

    def __init__(self, quotas: Quotas, now_s: float) -> None:
        self._quotas = quotas
        self._now_s = now_s
        self._promised: dict[str, tuple[int, int]] = {}

    def admits(self, tenant: str, num_seqs: int, most_blocks: int) -> bool:
        """Whether so many more sequences, of so many blocks in all, are within its quota, beside what it was promised."""
        seqs, blocks = self._promised.get(tenant, (0, 0))
        if self._quotas.over(tenant, seqs + num_seqs, blocks + most_blocks, self._now_s):
            self._quotas.passed_over(tenant, self._now_s)
            return False
        return True

    def promise(self, tenant: str, num_seqs: int, most_blocks: int) -> None:
        """They will be admitted, and count from now on."""
        seqs, blocks = self._promised.get(tenant, (0, 0))
        self._promised[tenant] = (seqs + num_seqs, blocks + most_blocks)
