"""Packed columns: the layout on disk, and no loss."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tokenmill_scheduler.core.plans import TokenLogprobs
from tokenmill_scheduler.ledger import codec

from tests.fakes.ledger_records import submission

token_ids = st.integers(0, 2**32 - 1)
floats = st.floats(allow_nan=False)
entries = st.builds(TokenLogprobs, floats, st.lists(st.tuples(token_ids, floats), max_size=5).map(tuple))


def test_tokens_are_little_endian_u32() -> None:
    assert codec.pack_tokens((1, 0x01020304)) == b"\x01\x00\x00\x00\x04\x03\x02\x01"
    assert codec.unpack_tokens(b"\x01\x00\x00\x00\x04\x03\x02\x01") == (1, 0x01020304)


@given(st.lists(token_ids).map(tuple))
def test_tokens_come_back(tokens: tuple[int, ...]) -> None:
    assert codec.unpack_tokens(codec.pack_tokens(tokens)) == tokens


@given(st.lists(entries, max_size=6).map(tuple), st.lists(entries, max_size=6).map(tuple))
def test_logprobs_come_back_and_join(left: tuple[TokenLogprobs, ...], right: tuple[TokenLogprobs, ...]) -> None:
    """Chunks are joined as bytes."""
    assert codec.unpack_logprobs(codec.pack_logprobs(left) + codec.pack_logprobs(right)) == left + right


def test_parameters_stored_before_a_field_existed_get_its_default() -> None:
    """A database outlives the release that wrote it."""
    sampling = '{"max_tokens":5,"seed":1,"logit_bias":[],"stop_token_ids":[]}'
    old = f'{{"sampling":{sampling},"stop":[],"include_stop":false,"cache_salt":""}}'
    assert codec.unpack_parameters(old)["sampling"].temperature == 1.0


def test_parameters_are_ascii() -> None:
    assert codec.pack_parameters(submission(prompt=(1,)).request).isascii()
