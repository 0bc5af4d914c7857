"""What is booked at admission, what is preempted for it, and what outputs teach."""

from __future__ import annotations

import pytest
from tokenmill_scheduler.core.admission import admission_named
from tokenmill_scheduler.core.counters import Preemption
from tokenmill_scheduler.core.lengths import ENOUGH, MAX_WINDOWS, WINDOW, OutputLengths
from tokenmill_scheduler.core.live import LiveRequest
from tokenmill_scheduler.core.request import Request, Sampling, State
from tokenmill_scheduler.core.scheduler import SchedulerConfig

from tests.simulation.world import World, description


def _booked(admission: str, *, ended: int = 0) -> int:
    """Blocks of 4 booked for a prompt of 4 and at most 40 tokens of output, when others have made 8 each."""
    world = World(SchedulerConfig(admission=admission), description(num_blocks=16))
    for seed in range(1, ended + 1):
        # A seed that is no multiple of 3 ends at its length.
        world.submit(3 * seed + 1, prompt=4, max_tokens=8)
        world.drain()
    world.submit(7_001, prompt=4, max_tokens=40)
    world.plan()
    (view,) = world.core.executors()
    return 16 - view.free_blocks


def test_each_mode_books_what_it_says() -> None:
    assert _booked("optimistic") == 2, "5 tokens"
    assert _booked("never-evict") == 11, "43 tokens: the last is never computed"
    assert _booked("expected-length") == 11, "nothing is known yet"
    assert _booked("expected-length", ended=ENOUGH - 1) == 11
    assert _booked("expected-length", ended=ENOUGH) == 3, "4 and the 8 that others made"


@pytest.mark.parametrize(("admission", "preempts"), [("optimistic", True), ("never-evict", False), ("expected-length", False)])
def test_only_those_that_grow_unforeseen_are_preempted(admission: str, preempts: bool) -> None:
    world = World(SchedulerConfig(admission=admission), description(num_blocks=12))
    for seed in (1, 2, 4, 5, 7, 8):
        world.submit(seed, prompt=8, max_tokens=16)
    world.drain()
    world.check_idle()
    counters = world.core.counters
    assert bool(counters.preempted[Preemption.OUT_OF_BLOCKS]) == preempts
    assert bool(counters.recomputed_tokens) == preempts
    assert all(world.output(r) == world.expected(r) for r in world.records)


def test_tokens_are_counted_as_recomputed_when_they_were_computed_before() -> None:
    world = World(None, description())
    world.submit(1, prompt=8, max_tokens=8)
    for _ in range(4):
        world.turn()
    world.lose()
    world.rejoin()
    # 8 of the prompt and 3 of the 4 sampled: the last had not been computed.
    world.turn()
    assert world.core.counters.recomputed_tokens == 11
    world.drain()
    assert world.core.counters.recomputed_tokens == 11


def test_the_executor_s_cache_saves_recomputing() -> None:
    world = World(None, description(caching=True))
    world.submit(1, prompt=8, max_tokens=8)
    for _ in range(4):
        world.turn()
    world.drain_executor()
    world.undrain_executor()
    world.drain()
    world.check_idle()
    assert world.core.counters.recomputed_tokens == 3, "the two blocks of the prompt were still there"


# ---- lengths -------------------------------------------------------------------------------------------------------------------


def test_a_tenant_s_own_outputs_count_once_there_are_enough() -> None:
    lengths = OutputLengths()
    assert lengths.expected("a", "m") is None
    for _ in range(ENOUGH):
        lengths.observe("b", "m", 100)
    assert lengths.expected("a", "m") == 100
    for _ in range(ENOUGH):
        lengths.observe("a", "m", 7)
    assert (lengths.expected("a", "m"), lengths.expected("b", "m")) == (7, 100)
    assert lengths.expected("a", "other") is None


def test_quantiles_are_those_of_the_latest() -> None:
    lengths = OutputLengths()
    for length in [10_000] * WINDOW + list(range(WINDOW)):
        lengths.observe("a", "m", length)
    assert lengths.expected("a", "m", 0.0) == 0
    assert lengths.expected("a", "m", 0.5) == WINDOW // 2
    assert lengths.expected("a", "m", 0.75) == 3 * WINDOW // 4
    assert lengths.expected("a", "m", 1.0) == WINDOW - 1


def test_tenants_without_end_are_forgotten() -> None:
    lengths = OutputLengths()
    for number in range(3 * MAX_WINDOWS):
        lengths.observe(f"t{number}", "m", 1)
    assert len(lengths._windows) == MAX_WINDOWS


@pytest.mark.parametrize(
    ("mode", "made", "booked"),
    [
        # Ten outputs were 6 tokens long; the prompt has 4, and the last of 24 is never computed.
        ("optimistic", 0, 5),
        ("optimistic", 18, 23),
        ("optimistic", 19, 23),
        ("expected-length", 0, 10),
        ("expected-length", 6, 11),
        ("expected-length", 12, 17),
        ("expected-length", 19, 23),
        ("never-evict", 0, 23),
        ("never-evict", 12, 23),
    ],
)
def test_what_is_booked_covers_what_is_known_and_no_more_than_can_be_computed(mode: str, made: int, booked: int) -> None:
    lengths = OutputLengths()
    for _ in range(10):
        lengths.observe("t", "tiny", 6)
    request = Request("r", "tiny", (1, 2, 3, 4), Sampling(max_tokens=20, seed=0), 0.0, tenant="t")
    live = LiveRequest(request, 1, State.PREEMPTED if made else State.WAITING, output=[1] * made)
    assert admission_named(mode, lengths).tokens(live, live.limit(4096) - 1) == booked
