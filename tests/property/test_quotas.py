"""Quotas and modes of admission under random load: never exceeded, nobody held up by another, no eviction where none is promised.

What tenants use is counted here from the records of what the scheduler said and from the model executors' own blocks.
"""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenmill_scheduler.core.counters import Preemption
from tokenmill_scheduler.core.effects import TokensGenerated, Transitioned
from tokenmill_scheduler.core.quotas import BURST_S, Quota
from tokenmill_scheduler.core.request import RUNNING, State
from tokenmill_scheduler.core.scheduler import SchedulerConfig

from tests.simulation.world import World, description

LIMITED, FREE = ("a", "b"), "free"
QUOTAS = st.builds(
    Quota,
    max_num_seqs=st.none() | st.integers(1, 3),
    max_kv_blocks=st.none() | st.integers(4, 12),
    max_tokens_per_s=st.none() | st.integers(5, 50),
)
# Tenant, prompt, output.
REQUESTS = st.tuples(st.sampled_from((*LIMITED, FREE)), st.integers(1, 9), st.integers(1, 8))
STEPS = st.lists(st.one_of(REQUESTS, st.sampled_from(["turn", "turn", "plan", "answer", "wait", "cancel"])), max_size=60)
SETTINGS = settings(max_examples=120, deadline=None, derandomize=True)


class Ledger:
    """Counts what tenants use, from outside."""

    def __init__(self, world: World, quotas: dict[str, Quota]) -> None:
        self.world, self.quotas = world, quotas
        self._seen = 0
        # Tokens in each bucket, and when they were counted.
        self._levels = {tenant: (quota.max_tokens_per_s or 0) * BURST_S for tenant, quota in quotas.items()}
        self._at_s = world.now_s

    def check(self) -> None:
        self._check_tokens()
        for tenant, quota in self.quotas.items():
            requests = [r for r in self.world.records.values() if r.request.tenant == tenant]
            running = sum(r.state in RUNNING for r in requests)
            assert quota.max_num_seqs is None or running <= quota.max_num_seqs
            held = self._held_blocks({r.request.sampling.seed for r in requests})
            assert quota.max_kv_blocks is None or held <= quota.max_kv_blocks

    def _held_blocks(self, seeds: set[int]) -> int:
        sequences = self.world.executors["x"]._sequences.values()
        return sum(len(sequence.blocks) for sequence in sequences if sequence.admission.sampling.seed in seeds)

    def _check_tokens(self) -> None:
        """Nobody is admitted without a token in its bucket."""
        passed_s, self._at_s = self.world.now_s - self._at_s, self.world.now_s
        for tenant, quota in self.quotas.items():
            rate = quota.max_tokens_per_s or 0
            self._levels[tenant] = min(rate * BURST_S, self._levels[tenant] + passed_s * rate)
        effects, self._seen = self.world.effects[self._seen :], len(self.world.effects)
        for effect in effects:
            if isinstance(effect, Transitioned) and effect.after is State.PREFILL:
                self._spend(effect.request_id, 0 if effect.before is State.PREEMPTED else None)
            elif isinstance(effect, TokensGenerated):
                for request_id, count in zip(effect.request_ids, effect.counts, strict=True):
                    self._spend(request_id, count)

    def _spend(self, request_id: str, tokens: int | None) -> None:
        """None: of its prompt, as it is admitted."""
        request = self.world.records[request_id].request
        if request.tenant in self.quotas and self.quotas[request.tenant].max_tokens_per_s is not None:
            assert tokens is not None or self._levels[request.tenant] > 0, f"{request_id} was admitted in debt"
            self._levels[request.tenant] -= len(request.prompt) if tokens is None else tokens


@SETTINGS
@given(quotas=st.tuples(QUOTAS, QUOTAS), steps=STEPS, fair_share=st.booleans(), seqs=st.integers(2, 6))
def test_quotas_are_never_exceeded_and_hold_up_nobody_else(
    quotas: tuple[Quota, Quota], steps: list[str | tuple[str, int, int]], fair_share: bool, seqs: int
) -> None:
    """There are blocks and tokens in a step for all, so who waits while a slot is free waits for its quota."""
    world = World(SchedulerConfig(max_num_seqs=seqs, fair_share=fair_share), description(num_blocks=200))
    by_tenant = dict(zip(LIMITED, quotas, strict=True))
    world.limit(**by_tenant)
    ledger = Ledger(world, by_tenant)
    for step in steps:
        _do(world, step, seqs)
        ledger.check()
    _finish(world, ledger)
    assert world.core.counters.preemptions == 0
    assert all(world.core._roster.quotas.in_use(tenant) == (0, 0) for tenant in (*LIMITED, FREE))


def _do(world: World, step: str | tuple[str, int, int], seqs: int) -> None:
    executor = world.executors["x"]
    match step:
        case (tenant, prompt, max_tokens):
            world.submit(len(world.records) + 1, prompt, max_tokens, tenant=tenant)
        case "plan":
            _plan(world, seqs)
        case "answer" if not executor.idle:
            world.step()
            world.deliver()
        case "turn":
            _plan(world, seqs)
            if not executor.idle:
                world.step()
                world.deliver()
        case "wait":
            world.tick(0.3)
        case "cancel" if world.unfinished:
            world.cancel(world.unfinished[0])


def _plan(world: World, seqs: int) -> None:
    """Leaves no slot empty while a request of the tenant without a quota waits."""
    (view,) = world.core.executors()
    world.plan()
    waits = any(r.request.tenant == FREE and r.state is State.WAITING for r in world.records.values())
    running = sum(r.state in RUNNING for r in world.records.values())
    assert not (view.plans_out < 2 and waits and running < seqs), "a tenant over its quota blocks another"


def _finish(world: World, ledger: Ledger) -> None:
    """All that may ever run runs, within the quotas; what is larger than its tenant's quota is the client's to take back."""
    for record in list(world.records.values()):
        if record.state is State.WAITING and world.core.never_within_quota(record.request):
            world.cancel(record.request.request_id)
    for _ in range(2_000):
        if not world._advance_all():
            break
        ledger.check()
    world.check_idle()


@SETTINGS
@given(
    shapes=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 16)), min_size=2, max_size=20),
    num_blocks=st.integers(7, 14),
    depth=st.integers(1, 3),
    overlap=st.booleans(),
    caching=st.booleans(),
)
def test_never_evict_preempts_nobody_for_blocks(
    shapes: list[tuple[int, int]], num_blocks: int, depth: int, overlap: bool, caching: bool
) -> None:
    config = SchedulerConfig(max_num_seqs=4, admission="never-evict")
    world = World(config, description(num_blocks=num_blocks, pipeline_depth=depth, caching=caching), overlap=overlap)
    for seed, (prompt, max_tokens) in enumerate(shapes, 1):
        world.submit(seed, prompt, max_tokens)
    world.drain()
    world.check_idle()
    assert world.core.counters.preempted == Counter()
    assert world.core.counters.preempted[Preemption.OUT_OF_BLOCKS] == world.core.counters.recomputed_tokens == 0
    assert all(record.state is State.DONE for record in world.records.values())
