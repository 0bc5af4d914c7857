"""Each output token once, in order: what `Progress` lets through and what it refuses."""

from __future__ import annotations

import pytest
from tokenmill_client import BrokenStream, FinishReason, RequestState, Usage
from tokenmill_client.progress import Progress
from tokenmill_client.records import Accepted, Delta, Finished, TokenLogprobs


def delta(first_index: int, *token_ids: int, text: str = "") -> Delta:
    return Delta(first_index, len(token_ids), token_ids, text)


def finished(output_tokens: int) -> Finished:
    return Finished(RequestState.DONE, FinishReason.STOP, Usage(3, output_tokens))


def greeted(first_index: int = 0) -> Progress:
    progress = Progress("a", first_index)
    assert progress.take(Accepted("a", 3)) is None
    return progress


def test_gathers_the_output() -> None:
    progress = greeted()
    assert progress.take(delta(0, 5, 6, text="he")) == delta(0, 5, 6, text="he")
    assert progress.output.finish_reason is None
    assert progress.output.usage == Usage(3, 2)
    progress.take(delta(2, 7, text="llo"))
    progress.take(finished(3))
    assert (progress.output.text, progress.output.token_ids) == ("hello", (5, 6, 7))
    assert progress.output.finish_reason is FinishReason.STOP


def test_goes_on_after_a_reconnection() -> None:
    progress = greeted()
    progress.take(delta(0, 5))
    progress.reconnected()
    assert progress.next_index == 1
    progress.take(Accepted("a", 3))
    progress.take(delta(1, 6))
    progress.take(finished(2))
    assert progress.output.token_ids == (5, 6)


def test_starts_in_the_middle() -> None:
    progress = greeted(first_index=4)
    progress.take(delta(4, 9))
    progress.take(finished(5))
    assert (progress.output.first_index, progress.output.token_ids, progress.output.usage) == (4, (9,), Usage(3, 5))


@pytest.mark.parametrize("index", [0, 2, 7])
def test_refuses_a_repeated_or_missing_index(index: int) -> None:
    progress = greeted()
    progress.take(delta(0, 5))
    with pytest.raises(BrokenStream, match=f"expected output token 1, got {index}"):
        progress.take(delta(index, 6))


def test_refuses_an_end_before_the_last_token() -> None:
    progress = greeted()
    progress.take(delta(0, 5))
    with pytest.raises(BrokenStream, match="ended with 2 output tokens, 1 were streamed"):
        progress.take(finished(2))


def test_refuses_columns_of_another_length() -> None:
    with pytest.raises(BrokenStream, match="1 entries for 2 tokens"):
        greeted().take(Delta(0, 2, (5,)))
    with pytest.raises(BrokenStream, match="1 entries for 2 tokens"):
        greeted().take(Delta(0, 2, (5, 6), logprobs=(TokenLogprobs(-0.5),)))


def test_refuses_another_requests_stream() -> None:
    with pytest.raises(BrokenStream, match="the stream is of b"):
        Progress("a").take(Accepted("b", 3))


def test_every_connection_begins_with_its_acceptance() -> None:
    with pytest.raises(BrokenStream, match="did not begin"):
        Progress("a").take(delta(0, 5))
    progress = greeted()
    progress.reconnected()
    with pytest.raises(BrokenStream, match="did not begin"):
        progress.take(delta(0, 5))


def test_refuses_a_second_acceptance_and_what_follows_the_end() -> None:
    progress = greeted()
    with pytest.raises(BrokenStream, match="twice"):
        progress.take(Accepted("a", 3))
    progress.take(finished(0))
    with pytest.raises(BrokenStream, match="after the end"):
        progress.take(finished(0))


def test_text_held_back_until_the_end_comes_once() -> None:
    progress = greeted()
    progress.take(delta(0, 5, text="a"))
    assert progress.take(delta(1, text="b")) is not None
    progress.reconnected()
    progress.take(Accepted("a", 3))
    assert progress.take(delta(1, text="b")) is None
    progress.take(finished(1))
    assert progress.output.text == "ab"
