"""Prefix caches as the core sees them: hashes, the mirror, predicted hits in plans, longest prefix match and its bound."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tokenmill_executor.prefix import PrefixHasher, hash_function, short_hash
from tokenmill_scheduler.core.events import Submitted
from tokenmill_scheduler.core.executor import ExecutorState
from tokenmill_scheduler.core.lineup import WINDOW, Lineup
from tokenmill_scheduler.core.live import LiveRequest
from tokenmill_scheduler.core.mirror import BlockHashes, Mirror
from tokenmill_scheduler.core.ordering import Ordering
from tokenmill_scheduler.core.plans import Blocks
from tokenmill_scheduler.core.policy import policy_named
from tokenmill_scheduler.core.queue import WaitingQueue
from tokenmill_scheduler.core.request import Lane, Request, Sampling, State
from tokenmill_scheduler.core.scheduler import SchedulerConfig

from tests.simulation.world import World, description


def live(prompt: tuple[int, ...], ordinal: int = 1, output: list[int] | None = None, salt: str = "") -> LiveRequest:
    request = Request(f"r{ordinal}", "tiny", prompt, Sampling(max_tokens=8, seed=1), float(ordinal), cache_salt=salt)
    return LiveRequest(request, ordinal, State.WAITING, output or [])


def warm_mirror(tokens: tuple[int, ...], block_size: int = 4) -> Mirror:
    mirror = Mirror("v", block_size, 100)
    count = len(tokens) // block_size
    mirror.apply((), BlockHashes("v", "", block_size).first(count, tokens))
    return mirror


def submit(world: World, seed: int, prompt: tuple[int, ...], max_tokens: int = 4) -> str:
    """With a prompt of its own, which `World.submit` has not."""
    request = Request(f"r{seed}", "tiny", prompt, Sampling(max_tokens=max_tokens, seed=seed), world.now_s)
    world.records[request.request_id] = type(next(iter(world.records.values())))(request, number=len(world.records))
    world.handle(Submitted(request))
    return request.request_id


# ---- hashes and mirror ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("salt", ["", "tenant-a"])
def test_scheduler_and_executor_hash_alike(salt: str) -> None:
    """The two never import each other, so here is where they are held against each other."""
    tokens = [(7 * number) % 49_152 for number in range(100)]
    hasher = PrefixHasher(hash_function("sha256"), "smollm2 bfloat16", 16)
    digests: list[bytes] = []
    hasher.extend(digests, hasher.root(salt), tokens, 6)
    hashes = BlockHashes("smollm2 bfloat16", salt, 16)
    assert list(hashes.first(2, tokens)) == [short_hash(digest) for digest in digests[:2]]
    assert list(hashes.first(6, tokens)) == [short_hash(digest) for digest in digests]


@pytest.mark.parametrize(("length", "hit"), [(3, 0), (4, 0), (5, 4), (11, 8), (12, 8), (13, 12), (40, 12)])
def test_a_predicted_hit_is_whole_blocks_and_never_the_last_token(length: int, hit: int) -> None:
    mirror = warm_mirror(tuple(range(12)))
    assert mirror.hit(live(tuple(range(length)))) == hit


def test_output_counts_once_it_is_known_and_salts_are_apart() -> None:
    mirror = warm_mirror(tuple(range(12)))
    assert mirror.hit(live((0, 1, 2, 3, 4), output=[5, 6, 7, 8])) == 8
    assert mirror.hit(live(tuple(range(12)), salt="other")) == 0
    assert Mirror(None, 4, 100).hit(live(tuple(range(12)))) == 0


def test_the_mirror_follows_what_is_dropped_and_is_bounded() -> None:
    tokens = tuple(range(12))
    hashes = list(BlockHashes("v", "", 4).first(3, tokens))
    mirror = warm_mirror(tokens)
    mirror.apply(dropped=[hashes[2]], stored=[])
    assert mirror.hit(live((*tokens, 12))) == 8
    mirror.apply(dropped=[hashes[1]], stored=[hashes[1], hashes[2]])
    assert mirror.hit(live((*tokens, 12))) == 12
    mirror.apply((), range(1000))
    assert len(mirror) == 100


def test_the_mirror_has_room_for_what_is_in_host_memory_too() -> None:
    state = ExecutorState(replace(description(num_blocks=8, caching=True), num_host_blocks=24), 1, Blocks(8, 0, 0), 4, 64)
    state.mirror.apply((), range(1000))
    assert len(state.mirror) == 32


# ---- plans ---------------------------------------------------------------------------------------------------------------------


def test_a_predicted_hit_leaves_its_share_of_the_budget_to_others() -> None:
    world = World(SchedulerConfig(max_num_batched_tokens=16), description(max_num_batched_tokens=16, caching=True))
    world.submit(3, prompt=14, max_tokens=1)
    world.turn()
    world.submit(6, prompt=14, max_tokens=1)
    world.submit(9, prompt=14, max_tokens=1)
    plan = world.turn()
    # Twelve of fourteen tokens are cached: two each instead of fourteen and two.
    assert plan is not None
    assert plan.advance_max_tokens == (2, 2)
    world.drain()
    world.check_idle()
    counters = world.core.counters
    assert (counters.prefix_cache_queries, counters.prefix_cache_hits) == (3 * 14, 2 * 12)


def test_a_wrong_prediction_costs_a_step_and_nothing_else() -> None:
    world = World(SchedulerConfig(max_num_batched_tokens=16), description(max_num_batched_tokens=16, caching=True))
    world.submit(3, prompt=14, max_tokens=1)
    world.turn()
    world.executors["x"].pool.keys.clear()
    world.executors["x"].pool.free += world.executors["x"].pool.idle
    world.executors["x"].pool.idle.clear()
    request_id = world.submit(6, prompt=14, max_tokens=3)
    assert world.turn() is not None
    world.drain()
    assert world.output(request_id) == world.expected(request_id)


def test_a_hit_that_nobody_foretold_samples_early_and_ends_on_time() -> None:
    """The mirror is empty; a prompt booked in two chunks is done in the first, while the second is out, with one token to make."""
    world = World(SchedulerConfig(max_num_batched_tokens=8), description(max_num_batched_tokens=8, caching=True))
    world.submit(3, prompt=14, max_tokens=1)
    world.drain()
    world.core._roster.executors["x"].mirror.clear()
    request_id = world.submit(6, prompt=14, max_tokens=1)
    first, second = world.plan(), world.plan()
    assert first is not None
    assert second is not None
    assert (first.advance_max_tokens, second.advance_max_tokens) == ((8,), (6,))
    result = world.step()
    assert result is not None
    assert result.num_cached == (12,)
    world.deliver()
    assert world.output(request_id) == world.expected(request_id)
    assert world.state(request_id) is State.DONE
    world.core._roster.executors["x"].mirror.apply((), world.executors["x"].pool.all_stored())
    world.drain()
    world.check_idle()


def test_a_scheduler_that_restarts_finds_the_cache_warm() -> None:
    world = World(None, description(caching=True))
    world.submit(3, prompt=14, max_tokens=1)
    world.drain()
    world.restart_scheduler()
    world.submit(6, prompt=14, max_tokens=1)
    plan = world.turn()
    assert plan is not None
    assert plan.advance_max_tokens == (2,)


# ---- longest prefix match ------------------------------------------------------------------------------------------------------


def lineup(policy: str, waiting: list[LiveRequest], mirror: Mirror) -> list[LiveRequest]:
    queue = WaitingQueue(Ordering(policy_named(policy, lambda live: 1), lambda live: 1, ageing_turn=0))
    for request in waiting:
        queue.add(request)
    return list(Lineup(queue, dict.fromkeys(Lane, 0), 8, 0.0, mirror.hit))


def test_lpm_takes_the_longest_hit_first_and_ties_by_arrival() -> None:
    mirror = warm_mirror(tuple(range(12)))
    cold, short, first, second = (
        live((9,) * 20, 1),
        live((0, 1, 2, 3, *[9] * 16), 2),
        live(tuple(range(20)), 3),
        live(tuple(range(20)), 4),
    )
    assert lineup("lpm", [cold, short, first, second], mirror) == [first, second, short, cold]
    assert lineup("fcfs", [cold, short, first, second], mirror) == [cold, short, first, second]


def test_lpm_looks_no_further_than_its_window() -> None:
    mirror = warm_mirror(tuple(range(12)))
    waiting = [live((9,) * 20, ordinal) for ordinal in range(WINDOW)] + [live(tuple(range(20)), WINDOW)]
    assert lineup("lpm", waiting, mirror) == waiting


def test_all_lanes_of_a_plan_have_one_window_together() -> None:
    mirror = warm_mirror(tuple(range(12)))
    urgent = [live((9,) * 20, ordinal) for ordinal in range(WINDOW)]
    for request in urgent:
        request.request = replace(request.request, lane=Lane.REAL_TIME)
    waiting = [*urgent, live((9,) * 20, WINDOW), live(tuple(range(20)), WINDOW + 1)]
    assert lineup("lpm", waiting, mirror) == waiting


def test_c34_a_cold_request_among_endless_warm_ones_runs_within_the_bound() -> None:
    bound = 5
    config = SchedulerConfig(max_num_seqs=1, policy="lpm", ageing_turn=bound)
    world = World(config, description(caching=True))
    world.submit(3, prompt=14, max_tokens=2)
    world.drain()
    submit(world, 1000, tuple(range(9000, 9014)), max_tokens=2)
    before = len(world.plans)
    for seed in range(6, 6 + 3 * 4 * bound, 3):
        world.submit(seed, prompt=14, max_tokens=2)
        world.submit(seed + 3000, prompt=14, max_tokens=2)
        for _ in range(2):
            world.turn()
        if world.state("r1000") is not State.WAITING:
            break
    assert world.state("r1000") is not State.WAITING, "it starves"
    assert sum(len(plan.admit) for plan in world.plans[before:]) == bound
