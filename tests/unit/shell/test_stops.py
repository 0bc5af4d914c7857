"""Stop strings judged on results, on a tokenizer whose token ids are the characters' codes."""

from __future__ import annotations

import pytest
from tokenmill_executor.simulated_tokenizer import tokenizer_files
from tokenmill_scheduler.core.events import TextStop
from tokenmill_scheduler.core.plans import Blocks, Result
from tokenmill_scheduler.core.request import State
from tokenmill_scheduler.live import LiveRequests, RequestView
from tokenmill_scheduler.stops import StopStrings
from tokenmill_scheduler.streams import Feed
from tokenmill_scheduler.text.model import TextModel

from tests.fakes.shell import request


@pytest.fixture(scope="module")
def text_model() -> TextModel:
    return TextModel(tokenizer_files())


def live_with(*stops: tuple[str, tuple[str, ...], str]) -> LiveRequests:
    """By id, stop strings and the text that is out already."""
    live = LiveRequests()
    for request_id, stop, out in stops:
        live.add(RequestView(request(request_id, stop=stop), State.DECODE, Feed([*map(ord, out)])), now_s=0.0)
    return live


def result_of(*texts: tuple[int, str]) -> Result:
    """Sequence ids and the text sampled for each."""
    sequence_ids = tuple(sequence_id for sequence_id, _ in texts)
    counts = tuple(len(text) for _, text in texts)
    tokens = tuple(ord(character) for _, text in texts for character in text)
    return Result(1, 1, sequence_ids, counts, counts, tokens, (0,) * len(texts), Blocks(1, 0, 0))


OWNERS = {1: "a", 2: "b", 3: "gone"}


def judge_of(live: LiveRequests, text_model: TextModel) -> StopStrings:
    return StopStrings(live, lambda executor, sequence_id: OWNERS.get(sequence_id), lambda model: text_model)


async def test_c58_tokens_up_to_the_one_that_completes_the_stop_string_are_kept(text_model: TextModel) -> None:
    stops = judge_of(live_with(("a", ("END",), "")), text_model)
    assert stops.judge("x", result_of((1, "some END more"))) == {1: TextStop(keep=8)}


async def test_a_stop_string_over_several_results(text_model: TextModel) -> None:
    live = live_with(("a", ("END",), ""))
    stops = judge_of(live, text_model)
    feed = live_feed(live, "a")
    for text in ("xE", "N"):
        assert stops.judge("x", result_of((1, text))) == {}
        feed.append([*map(ord, text)])
    assert stops.judge("x", result_of((1, "Dy"))) == {1: TextStop(keep=1)}


async def test_c58_a_stop_string_that_began_before_a_restart(text_model: TextModel) -> None:
    stops = judge_of(live_with(("a", ("END",), "stored EN")), text_model)
    assert stops.judge("x", result_of((1, "D"))) == {1: TextStop(keep=1)}


async def test_tokens_that_the_core_did_not_keep_are_forgotten(text_model: TextModel) -> None:
    live = live_with(("a", ("END",), "."))
    stops = judge_of(live, text_model)
    assert stops.judge("x", result_of((1, "EN"))) == {}
    # The executor was lost with this result dropped: the sequence goes on from what is known.
    assert stops.judge("x", result_of((1, "D"))) == {}
    live_feed(live, "a").append([ord("D")])
    assert stops.judge("x", result_of((1, "END"))) == {1: TextStop(keep=3)}


async def test_each_sequence_is_judged_by_its_own_tokens_and_stops(text_model: TextModel) -> None:
    stops = judge_of(live_with(("a", ("AB",), ""), ("b", (), "")), text_model)
    assert stops.judge("x", result_of((2, "AB"), (9, "AB"), (3, "AB"), (1, "xAB"))) == {1: TextStop(keep=3)}


async def test_without_stop_strings_no_owner_is_asked_for(text_model: TextModel) -> None:
    def owner(executor: str, sequence_id: int) -> str | None:
        raise AssertionError("asked")

    stops = StopStrings(live_with(("a", (), "")), owner, lambda model: text_model)
    assert stops.judge("x", result_of((1, "END"))) == {}


def live_feed(live: LiveRequests, request_id: str) -> Feed:
    found = live.get(request_id)
    assert found is not None
    return found.feed
