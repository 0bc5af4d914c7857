"""Which records readers may be told of a little later."""

from __future__ import annotations

from tokenmill_scheduler.core.effects import TokensGenerated
from tokenmill_scheduler.live import may_wait

from tests.fakes.ledger_records import decode, done, prefill, submission, tokens

SEVERAL = TokensGenerated(("a", "b"), (3, 7), (1, 1), (5, 6), 103.0)


def test_further_tokens_of_several_requests_may_gather() -> None:
    assert may_wait([SEVERAL])


def test_an_admission_may_wait_for_the_first_token() -> None:
    assert may_wait([prefill()])
    assert may_wait([SEVERAL, prefill()])


def test_a_single_stream_a_first_token_and_an_end_are_told_at_once() -> None:
    assert not may_wait([tokens("a", 3, 5)])
    assert not may_wait([SEVERAL, done()])
    assert not may_wait([SEVERAL, decode()])
    assert not may_wait([submission()])
