"""Incremental detokenisation against the tokenizer's own decode of everything at once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenmill_scheduler.text.model import TextModel, TextStream

from tests.fakes.text_models import byte_level_model, byte_level_tokenizer, sentencepiece_model, sentencepiece_tokenizer

BOTH = pytest.mark.parametrize(
    ("tokenizer", "model"),
    [(byte_level_tokenizer(), byte_level_model()), (sentencepiece_tokenizer(), sentencepiece_model())],
    ids=["bytes", "spm"],
)
byte_level_ids = st.lists(st.integers(0, byte_level_tokenizer().get_vocab_size() + 2), max_size=40)
sentencepiece_ids = st.lists(st.integers(0, sentencepiece_tokenizer().get_vocab_size() + 2), max_size=40)
texts = st.text(st.sampled_from("ab hello\n你好é🎉👩🏽‍🚀"), max_size=20)


def expected(tokenizer: Tokenizer, prompt: list[int], output: list[int]) -> str:
    """The documented definition: the decode of all, less what it shares at its start with the decode of the prompt."""
    whole, before = tokenizer.decode(prompt + output), tokenizer.decode(prompt)
    shared = next((i for i, (a, b) in enumerate(zip(whole, before, strict=False)) if a != b), len(before))
    return whole[shared:]


def whole_characters(tokenizer: Tokenizer, prompt: list[int]) -> str:
    """What a prompt made from a text shows of it, less the character it is cut in.

    A shorter prompt can show more: byte fallback replaces all that stands in one run with the cut character.
    """
    return max((tokenizer.decode(prompt[:length]).rstrip("\ufffd") for length in range(len(prompt) + 1)), key=len)


def run(stream: TextStream, output: list[int]) -> str:
    return "".join([stream.feed([token_id]).text for token_id in output]) + stream.finish()


@settings(deadline=None)
@given(byte_level_ids, byte_level_ids)
def test_c75_any_bytes_after_any_prompt_equal_the_full_decode(prompt: list[int], output: list[int]) -> None:
    stream = byte_level_model().stream(prompt)
    assert run(stream, output) == expected(byte_level_tokenizer(), prompt, output)


@BOTH
@settings(deadline=None)
@given(text=texts, data=st.data())
def test_c75_any_cut_between_prompt_and_output_equals_the_full_decode(
    tokenizer: Tokenizer, model: TextModel, text: str, data: st.DataObject
) -> None:
    token_ids = tokenizer.encode(text).ids
    cut = data.draw(st.integers(0, len(token_ids)))
    output = run(model.stream(token_ids[:cut]), token_ids[cut:])
    assert whole_characters(tokenizer, token_ids[:cut]) + output == tokenizer.decode(token_ids)


@settings(deadline=None)
@given(sentencepiece_ids, sentencepiece_ids)
def test_c75_byte_fallback_gives_no_more_replacements_than_the_full_decode(prompt: list[int], output: list[int]) -> None:
    text = run(sentencepiece_model().stream(prompt), output)
    assert text.count("\ufffd") <= sentencepiece_tokenizer().decode(prompt + output).count("\ufffd")


@BOTH
def test_c75_emoji_over_several_tokens_comes_once_and_whole(tokenizer: Tokenizer, model: TextModel) -> None:
    prompt = tokenizer.encode("a").ids
    output = tokenizer.encode("🎉", add_special_tokens=False).ids
    stream = model.stream(prompt)
    texts = [stream.feed([token_id]).text for token_id in output]
    assert "".join(texts).strip() == "🎉"
    assert texts[-1] == "🎉"
    assert stream.finish() == ""


@BOTH
def test_c75_prompt_that_ends_in_a_character(tokenizer: Tokenizer, model: TextModel) -> None:
    token_ids = tokenizer.encode("a🎉b").ids
    inside = len(token_ids) - 3
    assert tokenizer.decode(token_ids[:inside]).endswith("\ufffd")
    assert run(model.stream(token_ids[:inside]), token_ids[inside:]) == "🎉b"


@BOTH
def test_prompt_character_that_is_never_completed_is_not_output(tokenizer: Tokenizer, model: TextModel) -> None:
    prompt = tokenizer.encode("a🎉").ids[:-1]
    stream = model.stream(prompt)
    assert stream.finish() == ""
    assert run(model.stream(prompt), tokenizer.encode("b", add_special_tokens=False).ids).strip() == "b"


@BOTH
@settings(deadline=None)
@given(data=st.data())
def test_text_after_n_tokens_does_not_depend_on_chunks(tokenizer: Tokenizer, model: TextModel, data: st.DataObject) -> None:
    ids = st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=30)
    prompt, output = data.draw(ids), data.draw(ids)
    stops = data.draw(st.lists(st.sampled_from(["lo", "hell", "l", "\ufffd", " ", "你"]), max_size=3))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(output)), max_size=6)))
    singly, chunked = model.stream(prompt, stops), model.stream(prompt, stops)
    after = [""]
    for token_id in output:
        after.append(after[-1] + singly.feed([token_id]).text)
    text, begin = "", 0
    for cut in [*cuts, len(output)]:
        text += chunked.feed(output[begin:cut]).text
        assert text == after[cut]
        begin = cut
    assert chunked.finish() == singly.finish()


def test_sentencepiece_keeps_the_space_between_prompt_and_output_and_drops_the_first_of_a_text() -> None:
    tokenizer, model = sentencepiece_tokenizer(), sentencepiece_model()
    hello = tokenizer.get_vocab()["▁hello"]
    assert run(model.stream(tokenizer.encode("a").ids), [hello, hello]) == " hello hello"
    assert run(model.stream([]), [hello, hello]) == "hello hello"
    # the prompt is one special token: nothing shows before the output
    assert run(model.stream([1]), [2, hello, hello]) == "hello hello"


def test_special_and_stop_tokens_show_no_text_and_added_ones_do() -> None:
    tokenizer, model = byte_level_tokenizer(), byte_level_model()
    the, tool = tokenizer.encode("the", add_special_tokens=False).ids[0], tokenizer.get_vocab()["<tool>"]
    assert run(model.stream([the]), [0, tool, 1]) == "<tool>"
    assert run(model.stream([the], stop_token_ids=[tool]), [the, tool]) == tokenizer.decode([the])


def test_endless_invalid_output_is_given_out_as_it_comes() -> None:
    """A window that waits for valid text would grow with every token."""
    tokenizer, model = byte_level_tokenizer(), byte_level_model()
    lead = next(i for i in range(tokenizer.get_vocab_size()) if tokenizer.id_to_token(i) == "ð")
    stream = model.stream([])
    stream.feed([lead])
    assert [stream.feed([lead]).text for _ in range(100)] == ["\ufffd"] * 100


def test_a_decoder_that_does_not_add_up_is_refused() -> None:
    tokenizer = Tokenizer(models.WordLevel({"Hello": 0, "<unk>": 1}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.CTC(pad_token="<pad>")
    with pytest.raises(ValueError, match="cannot be streamed"):
        TextModel({"tokenizer.json": tokenizer.to_str().encode()})
