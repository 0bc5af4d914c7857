"""Seeded lives of requests among one to three schedulers under every fault at once; then the faults stop, and all must end well.

The seed is in the test's name. A seed that once failed becomes a test with a name of its own.
For thousands: TOKENMILL_SEEDS=5000 python -m pytest tests/simulation/test_lives.py
"""

from __future__ import annotations

import os
from collections import Counter

import pytest
from tokenmill_scheduler.core.live import INTERNAL
from tokenmill_scheduler.core.request import TERMINAL, State
from tokenmill_scheduler.ledger.records import StoredRequest

from tests.fakes.shell import output_of
from tests.simulation.mill import Mill
from tests.simulation.virtual import live

SEEDS = int(os.environ.get("TOKENMILL_SEEDS", "50"))
FIRST_SEED = int(os.environ.get("TOKENMILL_FIRST_SEED", "0"))
ACTS = 80
# In virtual seconds: all work there is, twice the lease, and the patience of whoever waits for an executor that is gone.
LIMIT_S = 60
LATE_S = 0.2


async def run(seed: int) -> Mill:
    mill = Mill(seed)
    clients = mill.clients
    with mill.links():
        await mill.start()
        acts = {
            clients.submit: 14,
            clients.watch: 6,
            clients.leave: 1,
            clients.cancel: 4,
            clients.update: 4,
            mill.crash_node: 1.5,
            mill.stop_node: 1,
            mill.stall_node: 1.5,
            mill.lose_database: 0.5,
            mill.cut_machine: 1,
            mill.crash_machine: 1,
        }
        for machine in mill.machines.values():
            machine.rough = 0.02
        for act in mill.rng.choices(list(acts), list(acts.values()), k=ACTS):
            if (doing := act()) is not None:
                await doing
            mill.check()
            await mill.pause()
        mill.stop_faults()
        await mill.wait_until_all_have_ended(LIMIT_S)
        await mill.close()
    return mill


def check_end(mill: Mill, stored: StoredRequest) -> None:
    clients, request_id = mill.clients, stored.request.request_id
    request, moves = clients.asked[request_id], mill.ledger.transitions(request_id)
    assert sum(move.after in TERMINAL for move in moves) == 1
    whole, tokens = output_of(request), mill.ledger.output(request_id).token_ids
    assert tokens == whole[: len(tokens)]
    updates = clients.updates.get(request_id, [])
    limits_s = [request.deadline_s, request.queue_deadline_s, *[deadline_s for _, deadline_s in updates]]
    match stored.state:
        case State.DONE:
            assert tokens == whole
            check_in_time(mill, stored)
        case State.CANCELLED:
            assert request_id in clients.cancelled or not request.detached
        case State.EXPIRED:
            assert stored.finished_s is not None
            assert any(limit_s is not None and limit_s <= stored.finished_s for limit_s in limits_s)
        case State.FAILED:
            # The core may give up on a request that executors were lost with again and again; here that is chance.
            assert stored.error_code == INTERNAL, stored.error
            assert stored.preemptions >= 2


def check_in_time(mill: Mill, stored: StoredRequest) -> None:
    """One that was not EXPIRED ran before its queue timeout and ended before its deadline, but for a tick and a step."""
    request_id, request = stored.request.request_id, mill.clients.asked[stored.request.request_id]
    ran_s = next(move.at_s for move in mill.ledger.transitions(request_id) if move.after is State.PREFILL)
    assert stored.finished_s is not None
    if request.queue_deadline_s is not None:
        assert ran_s <= request.queue_deadline_s + LATE_S
    if request.deadline_s is not None and request_id not in mill.clients.updates:
        assert stored.finished_s <= request.deadline_s + LATE_S


def check(mill: Mill) -> None:
    for request_id in sorted(mill.clients.accepted):
        stored = mill.ledger.find(request_id)
        assert stored is not None, "accepted is durable"
        check_end(mill, stored)
    for watcher in mill.clients.watchers:
        assert watcher.ended is not None
        assert tuple(watcher.tokens) == mill.ledger.output(watcher.request.request_id).token_ids
        assert watcher.ended.num_output_tokens == len(watcher.tokens)


@pytest.mark.parametrize("seed", range(FIRST_SEED, FIRST_SEED + SEEDS))
def test_random_lives_end_well(seed: int) -> None:
    mill = live(lambda: run(seed))
    check(mill)


def test_the_lives_reach_what_they_are_for() -> None:
    """Guards the generator: endings, schedulers that were fenced, and requests that changed hands are seen."""
    seen: Counter[str] = Counter()
    for seed in range(8):
        mill = live(lambda seed=seed: run(seed))  # type: ignore[misc]
        for request_id in mill.clients.accepted:
            stored = mill.ledger.find(request_id)
            assert stored is not None
            seen[stored.state] += 1
        seen["fenced"] += mill.fenced
        seen["changed hands"] += sum(len(names) > 1 for names in mill.seen_at.values())
    assert all(seen[kind] >= 3 for kind in (State.DONE, State.CANCELLED, State.EXPIRED, "fenced", "changed hands")), seen
