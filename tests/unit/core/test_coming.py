"""Requests that begin alike: one computes the beginning, the others wait for its blocks, only as long as somebody computes them."""

from __future__ import annotations

import pytest
from tokenmill_scheduler.core.coming import LEAST_SHARED, ComingBlocks
from tokenmill_scheduler.core.request import Request, Sampling, State
from tokenmill_scheduler.core.scheduler import SchedulerConfig
from tokenmill_scheduler.core.sequence import Sequence

from tests.simulation.world import World, description

BLOCK = 4
BEGINNING = tuple(range(1000, 1000 + LEAST_SHARED))


def world(budget: int = 600, caching: bool = True) -> World:
    executor = description(num_blocks=600, max_model_len=600, max_num_batched_tokens=budget, caching=caching)
    return World(SchedulerConfig(max_num_batched_tokens=budget), executor)


def submit(made: World, seed: int, prompt: tuple[int, ...], max_tokens: int = 3) -> str:
    request = Request(f"r{seed}", "tiny", prompt, Sampling(max_tokens=max_tokens, seed=seed), made.now_s)
    made.submit_request(request)
    return request.request_id


def own(seed: int, length: int = 10) -> tuple[int, ...]:
    return tuple(100 * seed + place for place in range(length))


def computed(made: World) -> int:
    return made.core.counters.prompt_tokens - made.core.counters.prefix_cache_hits


def test_of_a_burst_that_begins_alike_one_computes_the_beginning_and_the_others_their_own_ends() -> None:
    made = world()
    ids = [submit(made, seed, (*BEGINNING, *own(seed))) for seed in (1, 2, 3)]
    other = submit(made, 4, own(4, 50))
    first = made.plan()
    assert first is not None
    # What is left of the budget is for who begins otherwise.
    assert first.advance_max_tokens == (LEAST_SHARED + 10, 50)
    second = made.plan()
    assert second is not None
    assert second.advance_max_tokens == (1, 1, 10, 10)
    made.drain()
    made.check_idle()
    assert computed(made) == LEAST_SHARED + 3 * 10 + 50
    assert all(made.output(request_id) == made.expected(request_id) for request_id in (*ids, other))


def test_a_beginning_computed_in_chunks_is_waited_for_to_its_end_and_no_longer() -> None:
    made = world(budget=64)
    submit(made, 1, (*BEGINNING, *own(1, 100)))
    submit(made, 2, (*BEGINNING, *own(2)))
    plans = [made.turn() for _ in range(4)]
    assert [plan.advance_max_tokens for plan in plans if plan is not None] == [(64,), (64,), (64,), (36, 10)]
    made.drain()
    made.check_idle()


@pytest.mark.parametrize("shared", [LEAST_SHARED - BLOCK, LEAST_SHARED])
def test_little_in_common_is_not_waited_for(shared: int) -> None:
    made = world()
    for seed in (1, 2):
        submit(made, seed, (*BEGINNING[:shared], *own(seed, 140)))
    plan = made.plan()
    assert plan is not None
    assert len(plan.advance_max_tokens) == (1 if shared == LEAST_SHARED else 2)


def test_without_a_prefix_cache_nobody_waits() -> None:
    made = world(caching=False)
    for seed in (1, 2):
        submit(made, seed, (*BEGINNING, *own(seed)))
    plan = made.plan()
    assert plan is not None
    assert len(plan.advance_max_tokens) == 2


def test_a_request_of_another_tenants_cache_is_not_waited_for() -> None:
    made = world()
    for seed, salt in ((1, "a"), (2, "b")):
        request = Request(
            f"r{seed}", "tiny", (*BEGINNING, *own(seed)), Sampling(max_tokens=3, seed=seed), made.now_s, cache_salt=salt
        )
        made.submit_request(request)
    plan = made.plan()
    assert plan is not None
    assert len(plan.advance_max_tokens) == 2


def test_when_the_one_that_computes_it_is_cancelled_the_next_goes_on_alone() -> None:
    made = world(budget=64)
    first = submit(made, 1, (*BEGINNING, *own(1)))
    second = submit(made, 2, (*BEGINNING, *own(2)))
    third = submit(made, 3, (*BEGINNING, *own(3)))
    assert made.turn() is not None
    made.cancel(first)
    plan = made.turn()
    assert plan is not None
    assert len(plan.admit) >= 1
    made.drain()
    made.check_idle()
    assert made.state(first) is State.CANCELLED
    assert all(made.output(request_id) == made.expected(request_id) for request_id in (second, third))


def test_one_that_waits_is_waited_for_in_turn() -> None:
    """The second shares its own longer beginning with the third."""
    made = world()
    longer = (*BEGINNING, *own(7, LEAST_SHARED))
    submit(made, 1, (*BEGINNING, *own(1)))
    submit(made, 2, (*longer, *own(2)))
    submit(made, 3, (*longer, *own(3)))
    made.drain()
    made.check_idle()
    assert computed(made) == LEAST_SHARED + 10 + LEAST_SHARED + 10 + 10


def test_who_is_cancelled_while_it_waits_leaves_nothing_behind() -> None:
    made = world(budget=64)
    submit(made, 1, (*BEGINNING, *own(1)))
    second = submit(made, 2, (*BEGINNING, *own(2)))
    assert made.turn() is not None
    made.cancel(second)
    made.drain()
    made.check_idle()
    assert len(made.core._roster.executors["x"].coming) == 0


def test_blocks_belong_to_the_first_that_computes_them() -> None:
    coming = ComingBlocks()
    one, two = (Sequence(number, "x", None, 9, 9, 9) for number in (1, 2))
    coming.add(one, [1, 2, 3])
    coming.add(two, [1, 2, 8, 9])
    assert coming.find([1, 2, 3, 4], 0, 4) == (one, 3)
    assert coming.find([1, 2, 8, 9], 0, 3) == (two, 3)
    assert coming.find([5, 6], 0, 2) is None
    assert coming.find([0, 2, 3], 1, 3) == (one, 3)
    coming.arrived([1, 2])
    assert coming.find([1, 2, 3], 2, 3) == (one, 3)
    coming.remove(one)
    assert coming.find([1, 2, 3], 2, 3) is None
    assert len(coming) == 2
