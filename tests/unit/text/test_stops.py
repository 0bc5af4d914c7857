"""Stop strings against an oracle that looks at the whole text at once."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenmill_scheduler.text.stops import StopMatcher

from tests.fakes.text_models import byte_level_model, byte_level_tokenizer

parts = st.lists(st.text("abAé你", max_size=5), max_size=12)
stop_lists = st.lists(st.text("abAé你", min_size=1, max_size=5), min_size=1, max_size=4)


def cut(text: str, stops: list[str], include: bool, after: int = 0) -> str | None:
    """`text` cut at the first stop string to be complete behind the first `after` characters, the longest of several; None if none
    is in it."""
    for end in range(after + 1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[:end] if include else text[: end - max(map(len, complete))]
    return None


def shown(text: str, stops: list[str]) -> str:
    """`text` less its longest end that begins a stop string."""
    begins = [stop[:length] for stop in stops for length in range(1, len(stop))]
    held = max((len(begin) for begin in begins if text.endswith(begin)), default=0)
    return text[: len(text) - held]


@settings(deadline=None)
@given(parts, stop_lists, st.booleans())
@example(["ab", "ab", "A"], ["abA"], False)
@example(["aab"], ["ab", "aab"], False)
def test_matcher_equals_the_oracle_after_every_part(texts: list[str], stops: list[str], include: bool) -> None:
    matcher = StopMatcher(stops, include)
    seen = given_out = ""
    for text in texts:
        seen += text
        given_out += matcher.feed(text)
        stopped_text = cut(seen, stops, include)
        assert matcher.stopped == (stopped_text is not None)
        if stopped_text is not None:
            assert given_out == stopped_text
            return
        assert given_out == shown(seen, stops)
    assert given_out + matcher.finish() == seen


@settings(deadline=None)
@given(parts, stop_lists, st.booleans(), st.integers(0, 6))
@example(["ab", "ab"], ["ab"], False, 1)
@example(["aa", "a"], ["aa"], False, 1)
@example(["abA", "b"], ["Ab", "abA"], False, 1)
def test_parts_that_may_not_stop_are_passed_over(texts: list[str], stops: list[str], include: bool, passed: int) -> None:
    """What begins in them may be complete behind them."""
    matcher = StopMatcher(stops, include)
    after = len("".join(texts[:passed]))
    seen = given_out = ""
    for number, text in enumerate(texts):
        seen += text
        given_out += matcher.feed(text, may_stop=number >= passed)
        stopped_text = cut(seen, stops, include, after)
        assert matcher.stopped == (stopped_text is not None)
        if stopped_text is not None:
            assert given_out == stopped_text
            return
        assert given_out == shown(seen, stops)
    assert given_out + matcher.finish() == seen


def test_none_of_the_first_tokens_completes_a_stop_string() -> None:
    """However the tokens come, one after another or at once."""
    tokenizer = byte_level_tokenizer()
    the = tokenizer.encode("the", add_special_tokens=False).ids
    for min_tokens in range(len(the), 2 * len(the)):
        for pieces in ([*the, *the, *the],), [[token] for token in the * 3], [the, the, the]:
            stream = byte_level_model().stream([], ["e"], min_tokens=min_tokens)
            steps = [stream.feed(piece) for piece in pieces]
            assert "".join(step.text for step in steps) == "theth"
            before = sum(map(len, pieces[: next(i for i, step in enumerate(steps) if step.stopped_after is not None)]))
            assert before + next(step.stopped_after for step in steps if step.stopped_after is not None) == 2 * len(the)


@pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "ab###")])
def test_c58_stop_string_that_ends_inside_a_token(include: bool, text: str) -> None:
    tokenizer = byte_level_tokenizer()
    # "#" "##" where the second token goes on past the stop string
    token_ids = [*tokenizer.encode("ab", add_special_tokens=False).ids]
    hashes = tokenizer.encode("###", add_special_tokens=False).ids
    inside = tokenizer.encode("!", add_special_tokens=False).ids
    stream = byte_level_model().stream([], ["###"], include)
    output = token_ids + hashes + inside
    step = stream.feed(output)
    assert step.text == text
    assert step.stopped_after == len(token_ids) + len(hashes)


def test_c58_token_that_goes_on_past_the_stop_string_is_counted_and_cut() -> None:
    tokenizer = byte_level_tokenizer()
    hello = tokenizer.encode(" hello", add_special_tokens=False).ids
    assert len(hello) == 1, "the corpus makes it one token"
    the = tokenizer.encode("the", add_special_tokens=False).ids
    stream = byte_level_model().stream([], ["e he"])
    step = stream.feed([*the, *hello, *the])
    assert step.text == "th"
    assert step.stopped_after == len(the) + 1


def test_c60_tokens_after_the_stop_are_in_no_text() -> None:
    tokenizer = byte_level_tokenizer()
    the = tokenizer.encode("the", add_special_tokens=False).ids
    stream = byte_level_model().stream([], ["e"])
    assert stream.feed(the).stopped_after == len(the)
    after = stream.feed(the)
    assert (after.text, after.stopped_after, stream.finish()) == ("", 0, "")


def test_held_text_comes_out_at_the_end() -> None:
    tokenizer = byte_level_tokenizer()
    stream = byte_level_model().stream([], ["<END>"])
    assert stream.feed(tokenizer.encode("a<EN", add_special_tokens=False).ids).text == "a"
    assert stream.finish() == "<EN"


def test_sixteen_long_stops_that_are_nearly_reached_again_and_again() -> None:
    """A search that began anew at each character would take 400 million steps here."""
    matcher = StopMatcher(["a" * 255 + chr(0x100 + i) for i in range(16)], include=False)
    given_out = matcher.feed("a" * 100_000)
    assert len(given_out) == 100_000 - 255
    assert matcher.feed("\u0100") == ""
    assert matcher.stopped
