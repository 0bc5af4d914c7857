from __future__ import annotations

import pytest
from tokenmill_client.retry import Backoff, RetryPolicy

POLICY = RetryPolicy(first_delay_s=0.1, longest_delay_s=1.0, growth=2.0)


def delays(backoff: Backoff, jitter: float, limit_s: float = 100.0, most: int = 6) -> list[float]:
    """Waits of failures that follow each other at once."""
    now_s, waits = 50.0, list[float]()
    while (delay_s := backoff.next_delay_s(now_s, limit_s, jitter)) is not None and len(waits) < most:
        waits.append(delay_s)
        now_s += delay_s
    return waits


def test_grows_up_to_the_longest() -> None:
    # jitter 1 is the upper end of its range
    assert delays(Backoff(POLICY), jitter=1.0) == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.0, 1.0])


def test_jitter_takes_up_to_half() -> None:
    assert delays(Backoff(POLICY), jitter=0.0) == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.5, 0.5])


def test_by_default_a_wait_is_at_most_a_third_of_the_outage_so_far() -> None:
    waits = delays(Backoff(RetryPolicy()), jitter=1.0, most=20)
    for number in range(5, 20):
        assert waits[number] <= sum(waits[:number]) / 3 + RetryPolicy().first_delay_s
    assert waits[-1] == RetryPolicy().longest_delay_s


def test_ends_at_the_limit() -> None:
    assert delays(Backoff(POLICY), jitter=1.0, limit_s=0.5) == pytest.approx([0.1, 0.2, 0.2])


def test_the_limit_counts_from_the_first_failure_since_progress() -> None:
    backoff = Backoff(POLICY)
    assert backoff.next_delay_s(0.0, 10.0, 1.0) == pytest.approx(0.1)
    assert backoff.next_delay_s(10.0, 10.0, 1.0) is None
    backoff.reset()
    assert backoff.next_delay_s(10.0, 10.0, 1.0) == pytest.approx(0.1)


def test_heeds_the_servers_wish_up_to_the_longest_delay() -> None:
    assert Backoff(POLICY).next_delay_s(0.0, 10.0, 0.0, at_least_s=0.7) == pytest.approx(0.7)
    assert Backoff(POLICY).next_delay_s(0.0, 10.0, 0.0, at_least_s=60.0) == pytest.approx(1.0)


def test_a_very_long_outage_does_not_overflow() -> None:
    backoff = Backoff(POLICY)
    for _ in range(5_000):
        assert backoff.next_delay_s(0.0, 10.0, 1.0) is not None
