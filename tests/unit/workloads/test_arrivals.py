"""Fixed workloads, rates, lengths and prompts."""

from __future__ import annotations

from itertools import pairwise
from statistics import fmean

import pytest
from tokenmill_workloads import (
    FIXED,
    Arrival,
    at_rate,
    burst,
    poisson,
    prefill_heavy,
    prompts,
    scale_lengths,
    shared_prefix,
    single_stream,
)


def test_the_burst_is_the_same_every_time() -> None:
    assert burst() == burst()
    assert burst() != burst(seed=43)
    assert len(burst()) == 20
    assert all(10 <= arrival.prompt_tokens <= 100 and 20 <= arrival.output_tokens <= 200 for arrival in burst())


def test_fixed_workloads_come_at_once() -> None:
    totals = {name: (len(make()), sum(arrival.prompt_tokens for arrival in make())) for name, make in FIXED.items()}
    assert totals == {
        "burst": (20, sum(arrival.prompt_tokens for arrival in burst())),
        "decode-heavy": (32, 32 * 32),
        "prefill-heavy": (16, 16 * 1024),
        "shared-prefix": (16, 16 * 800),
        "single-stream": (1, 32),
    }
    assert {arrival.at_s for make in FIXED.values() for arrival in make()} == {0.0}


def test_poisson_arrivals_have_their_rate() -> None:
    timed = poisson(prefill_heavy(4_000), rate=5.0)
    gaps = [after.at_s - before.at_s for before, after in pairwise(timed)]
    assert timed[0].at_s == 0.0
    assert fmean(gaps) == pytest.approx(0.2, rel=0.05)
    # Of an exponential distribution the mean is the standard deviation.
    assert fmean((gap - 0.2) ** 2 for gap in gaps) ** 0.5 == pytest.approx(0.2, rel=0.05)
    assert timed == poisson(prefill_heavy(4_000), rate=5.0)


def test_a_rate_keeps_the_shape_of_the_gaps() -> None:
    recorded = (Arrival(10.0, 1, 1), Arrival(11.0, 1, 1), Arrival(14.0, 1, 1))
    assert [arrival.at_s for arrival in at_rate(recorded, rate=4.0)] == pytest.approx([0.0, 0.125, 0.5])
    assert at_rate(single_stream(), rate=2.0) == single_stream()
    assert at_rate((), rate=2.0) == ()


def test_lengths_are_scaled_and_never_none() -> None:
    (scaled,) = scale_lengths((Arrival(1.0, 1_000, 2, (7,)),), 0.1)
    assert scaled == Arrival(1.0, 100, 1, (7,), hash_block_tokens=51)


def test_prompts_are_as_long_as_asked_and_share_what_is_shared() -> None:
    made = prompts(shared_prefix(3), vocab_size=1_000)
    assert [len(prompt) for prompt in made] == [800, 800, 800]
    assert len({prompt[:768] for prompt in made}) == 1
    assert len({prompt[768:] for prompt in made}) == 3
    assert made == prompts(shared_prefix(3), vocab_size=1_000)
    assert made != prompts(shared_prefix(3), vocab_size=1_000, seed=43)
    assert all(256 <= token_id < 1_000 for prompt in made for token_id in prompt)


def test_a_block_cut_short_still_shares_its_beginning() -> None:
    long, short = prompts((Arrival(0.0, 20, 1, (1, 2), 10), Arrival(0.0, 15, 1, (1, 2), 10)), vocab_size=1_000)
    assert long[:15] == short


def test_a_tiny_vocabulary() -> None:
    assert set(prompts(single_stream(), vocab_size=10)[0]) == {9}
