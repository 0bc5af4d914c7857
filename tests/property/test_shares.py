"""Accounts of tenants that share fairly: each pays for what it gets, once, whatever happens to its requests on the way."""

from __future__ import annotations

from collections import Counter
from unittest.mock import patch

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenmill_scheduler.core.lineup import Lineup
from tokenmill_scheduler.core.live import LiveRequest
from tokenmill_scheduler.core.ordering import Ordering
from tokenmill_scheduler.core.policy import POLICIES, policy_named
from tokenmill_scheduler.core.queue import WaitingQueue
from tokenmill_scheduler.core.request import Lane, Request, Sampling, State
from tokenmill_scheduler.core.scheduler import SchedulerConfig
from tokenmill_scheduler.core.shares import FairShare

from tests.simulation.world import World, description

some = settings(max_examples=60, deadline=None, derandomize=True)
TENANTS = ("ann", "bob", "cid")
WEIGHTS = st.fixed_dictionaries({tenant: st.sampled_from([0.5, 1.0, 3.0]) for tenant in TENANTS})
# Tenant, prompt, max_tokens, and how much it had made when it was given up; None: it has not run.
SHAPES = st.tuples(st.sampled_from(TENANTS), st.integers(1, 30), st.integers(1, 30), st.none() | st.integers(0, 29))


def _remaining(live: LiveRequest) -> int:
    return max(1, live.request.sampling.max_tokens - len(live.output))


def _queue(shapes: list[tuple[str, int, int, int | None]], ordering: Ordering) -> WaitingQueue:
    """Those that have run have paid for what they came to."""
    queue = WaitingQueue(ordering)
    for ordinal, (tenant, prompt, max_tokens, made) in enumerate(shapes):
        request = Request(
            f"r{ordinal}", "tiny", (1,) * prompt, Sampling(max_tokens=max_tokens, seed=0), float(ordinal), tenant=tenant
        )
        live = LiveRequest(request, ordinal, State.WAITING if made is None else State.PREEMPTED)
        if made is not None:
            live.output = [1] * min(made, max_tokens - 1)
            queue.settle(live)
        queue.add(live)
    return queue


def _running(admitted: list[str]) -> dict[Lane, int]:
    return {**dict.fromkeys(Lane, 0), Lane.STANDARD: len(admitted)}


def _admit(queue: WaitingQueue, live: LiveRequest, admitted: list[str]) -> None:
    """As the roster does."""
    queue.admitted(live, 100.0)
    queue.remove(live)
    admitted.append(live.request_id)


@some
@given(shapes=st.lists(SHAPES, min_size=1, max_size=14), weights=WEIGHTS, policy=st.sampled_from(POLICIES), turn=st.integers(0, 4))
def test_one_plan_admits_as_many_plans_would(
    shapes: list[tuple[str, int, int, int | None]], weights: dict[str, float], policy: str, turn: int
) -> None:
    """A plan charges on its own copies what it comes to: of one that is resumed, what it has paid for is not charged again."""
    ordering = Ordering(policy_named(policy, _remaining), _remaining, (0, 0, 0), True, weights, turn, 0.0)
    one, at_once = _queue(shapes, ordering), list[str]()
    lineup = Lineup(one, _running([]), 64, 100.0, lambda live: 0)
    for live in lineup:
        lineup.admits(live)
        _admit(one, live, at_once)
    many, apart = _queue(shapes, ordering), list[str]()
    while len(many):
        _admit(many, next(iter(Lineup(many, _running(apart), 64, 100.0, lambda live: 0))), apart)
    assert at_once == apart
    assert [one.lanes[Lane.STANDARD].share.account(tenant) for tenant in TENANTS] == [
        many.lanes[Lane.STANDARD].share.account(tenant) for tenant in TENANTS
    ]


@some
@given(data=st.data(), blocks=st.integers(12, 24), slots=st.integers(1, 4))
def test_in_the_end_each_tenant_has_paid_for_its_tokens_and_no_more(data: st.DataObject, blocks: int, slots: int) -> None:
    """Prompts and outputs of all that ended, though some were preempted, some cancelled, some stopped before their limit."""
    charged: Counter[str] = Counter()
    charge = FairShare.charge

    def recorded(share: FairShare, tenant: str, tokens: int) -> None:
        charged[tenant] += tokens
        charge(share, tenant, tokens)

    with patch.object(FairShare, "charge", recorded):
        config = SchedulerConfig(max_num_seqs=slots, fair_share=True, watermark=0.0)
        world = World(config, description(num_blocks=blocks, block_size=4))
        for seed in range(1, 11):
            lane, tenant = data.draw(st.sampled_from(Lane)), data.draw(st.sampled_from(TENANTS))
            prompt, max_tokens = data.draw(st.integers(1, 16)), data.draw(st.integers(1, 24))
            world.submit(seed, prompt=prompt, max_tokens=max_tokens, tenant=tenant, lane=lane)
            for _ in range(data.draw(st.integers(0, 3))):
                world.turn()
            if data.draw(st.integers(0, 3)) == 0:
                world.cancel(f"r{data.draw(st.integers(1, seed))}")
        world.drain()
    due: Counter[str] = Counter()
    for record in world.records.values():
        if any(move.after is State.PREFILL for move in record.transitions):
            due[record.request.tenant] += len(record.request.prompt) + len(record.output)
    assert charged == due
