"""Tokenizers built from GGUF metadata against those that transformers builds from the same file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenmill_executor.model.config import ModelError
from tokenmill_executor.model.gguf_file import GgufFile
from tokenmill_executor.model.tokenizer_files import tokenizer_files

from tests.fakes.models import smollm2_path
from tests.unit.model.gguf_files import write_tokenizer

TEXTS = [
    "",
    "Hello, world! It's what they'd've said; WE'LL see.",
    " leading and trailing ",
    "12345678 3.14159 0x7f 1,000,000 v2.0½",
    "你好，世界。今日は東京、안녕하세요 세계",
    "Ünïcödé naïve Straße Привет мир שלום नमस्ते",
    "😀👩‍👩‍👧‍👦🇫🇷 ok 🤖🏽",
    "def f(x):\n    return {'a': x**2}  # comment\n\n\tif True:\r\n\t\tpass",
    "many     spaces \t\t tabs \n\n\n newlines   ",
    "<|im_start|>user\nHi<|im_end|> and <|endoftext|>",
    "<|im_start|><|im_end|>\n<|im_start|> x <|unknown|> <s> </s> <unk>",
    "\u00a0no-break\u3000ideographic\u200bzero\x00null\x7f",
    "e\u0301 combining",
]
CONTROL, USER_DEFINED = 3, 4


def ours(path: Path) -> tuple[Tokenizer, dict[str, Any]]:
    files = tokenizer_files(GgufFile(path))
    return Tokenizer.from_str(files["tokenizer.json"].decode()), json.loads(files["tokenizer_config.json"])


def theirs(path: Path) -> Any:
    import transformers

    return transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


@pytest.fixture(scope="module")
def smollm2() -> tuple[Tokenizer, dict[str, Any], Any]:
    path = smollm2_path()
    return *ours(path), theirs(path)


@pytest.mark.parametrize("text", TEXTS)
def test_smollm2_encodes_and_decodes_as_transformers(smollm2: tuple[Tokenizer, dict[str, Any], Any], text: str) -> None:
    tokenizer, _, oracle = smollm2
    ids = tokenizer.encode(text).ids
    assert ids == oracle(text).input_ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text == oracle.decode(ids)
    assert tokenizer.decode(ids) == oracle.decode(ids, skip_special_tokens=True)


def test_smollm2_config(smollm2: tuple[Tokenizer, dict[str, Any], Any]) -> None:
    tokenizer, config, oracle = smollm2
    assert tokenizer.get_vocab_size() == 49152
    assert (config["bos_token"], config["eos_token"], config["add_bos_token"]) == ("<|im_start|>", "<|im_end|>", False)
    assert config["chat_template"] == oracle.chat_template


CORPUS = [*TEXTS, *("the cat sat on the mat. It's there, they'll see 2024 1999 12345 " * 3).split("."), "don't DON'T we've"] * 4
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>"]


@pytest.fixture(scope="module")
def byte_level_bpe() -> tuple[list[str], list[str]]:
    """Tokens and merges of a small one, whose merges may reach over anything but spaces."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "merged_with_next"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700, show_progress=False, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    vocabulary = tokenizer.get_vocab()
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return sorted(vocabulary, key=lambda token: vocabulary[token]), [" ".join(merge) for merge in merges]


@pytest.mark.parametrize("pre", ["default", "llama-bpe", "qwen2", "tekken"])
def test_pre_tokenizers_cut_as_those_of_transformers(pre: str, byte_level_bpe: tuple[list[str], list[str]], tmp_path: Path) -> None:
    """Text with a combining accent is left out for qwen2: transformers drops the NFC of the original tokenizer, we keep it."""
    tokens, merges = byte_level_bpe
    types = [CONTROL if token in SPECIAL[:3] else USER_DEFINED if token in SPECIAL else 1 for token in tokens]
    path = tmp_path / "tokenizer.gguf"
    write_tokenizer(path, "gpt2", tokens, types, tokenizer_pre=pre, token_merges=merges, add_bos_token=False, eos_token_id=2)
    tokenizer, _ = ours(path)
    oracle = theirs(path)
    for text in [*TEXTS, "a<think>b</think>"]:
        if pre == "qwen2" and "\u0301" in text:
            assert tokenizer.encode(text).ids == tokenizer.encode("\u00e9 combining").ids
            continue
        assert tokenizer.encode(text).ids == oracle(text).input_ids, text


def test_smollm2_cuts_off_digits_beyond_ascii(smollm2: tuple[Tokenizer, dict[str, Any], Any]) -> None:
    """As the original tokenizer and llama.cpp do; transformers would merge the space with the digit's first byte."""
    assert smollm2[0].encode(" ٣").tokens[0] == "Ġ"


def test_digits_are_cut_one_by_one_for_smollm(byte_level_bpe: tuple[list[str], list[str]], tmp_path: Path) -> None:
    tokens, merges = byte_level_bpe
    path = tmp_path / "tokenizer.gguf"
    write_tokenizer(path, "gpt2", tokens, [1] * len(tokens), tokenizer_pre="smollm", token_merges=merges)
    assert ours(path)[0].encode("12345").tokens == ["1", "2", "3", "4", "5"]


@pytest.mark.parametrize(
    ("pre", "flag", "added"),
    [("llama-bpe", None, True), ("llama-bpe", False, False), ("qwen2", None, False), ("default", True, True)],
)
def test_the_beginning_of_sequence_follows_the_flag_and_else_the_kind(
    pre: str, flag: bool | None, added: bool, byte_level_bpe: tuple[list[str], list[str]], tmp_path: Path
) -> None:
    tokens, merges = byte_level_bpe
    fields: dict[str, Any] = {} if flag is None else {"add_bos_token": flag}
    path = tmp_path / "tokenizer.gguf"
    write_tokenizer(
        path,
        "gpt2",
        tokens,
        [CONTROL] * 3 + [1] * (len(tokens) - 3),
        tokenizer_pre=pre,
        token_merges=merges,
        bos_token_id=1,
        **fields,
    )
    tokenizer, config = ours(path)
    assert config["add_bos_token"] is added
    assert tokenizer.encode("a").tokens == ["<|im_start|>"] * added + ["a"]
    assert tokenizer.encode("a", add_special_tokens=False).tokens == ["a"]


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Words' beginnings, with scores that prefer the longer; bytes for the rest."""
    words = ["▁the", "▁cat", "▁sat", "he", "▁t", "▁c", "at", "▁s", "▁▁", "in", "▁world", "ld", "wor", "or", "▁wor"]
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyz.,!'", "你", "é"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words, *letters]
    types = [2, CONTROL, CONTROL, *[6] * 256, *[1] * (len(words) + len(letters))]
    scores = [0.0] * 259 + [-float(index) for index in range(len(words))] + [-1000.0 - index for index in range(len(letters))]
    path = tmp_path_factory.mktemp("sentencepiece") / "tokenizer.gguf"
    write_tokenizer(path, "llama", tokens, types, token_scores=scores, bos_token_id=1, eos_token_id=2, unk_token_id=0)
    return path


def test_sentencepiece_encodes_and_decodes(sentencepiece: Path) -> None:
    tokenizer, config = ours(sentencepiece)
    assert config["add_bos_token"] is True
    assert tokenizer.encode("the cat").tokens == ["<s>", "▁the", "▁cat"]
    for text in TEXTS:
        encoded = tokenizer.encode(text, add_special_tokens=False)
        if "<s>" not in text:
            assert tokenizer.decode(encoded.ids) == text
    assert tokenizer.encode("é😀", add_special_tokens=False).tokens == ["▁", "é", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>"]


@pytest.mark.parametrize("text", [text for text in TEXTS if text and "<s>" not in text and text[0] != " "])
def test_sentencepiece_merges_as_transformers(sentencepiece: Path, text: str) -> None:
    """Where text begins with a space, transformers leaves sentencepiece's own out; llama.cpp and sentencepiece do not."""
    assert ours(sentencepiece)[0].encode(text).ids == theirs(sentencepiece)(text).input_ids


def test_a_directory_is_read_as_it_is_with_its_template_joined(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        tokenizer_files(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(b'{"as": "it is"}')
    assert tokenizer_files(tmp_path) == {"tokenizer.json": b'{"as": "it is"}'}
    (tmp_path / "tokenizer_config.json").write_bytes(b'{"eos_token":"x"}')
    assert tokenizer_files(tmp_path)["tokenizer_config.json"] == b'{"eos_token":"x"}'
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    config = json.loads(tokenizer_files(tmp_path)["tokenizer_config.json"])
    assert config == {"eos_token": "x", "chat_template": "{{ messages }}"}


@pytest.mark.parametrize(
    ("model", "fields", "sentence"),
    [
        ("t5", {}, "of type 't5' are not supported"),
        ("gpt2", {"tokenizer_pre": "strange"}, "'strange' of the GGUF file is not supported"),
        ("llama", {}, "without scores"),
    ],
)
def test_unknown_kinds_are_refused_with_a_sentence(model: str, fields: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer.gguf", model, ["a"], [1], **fields)
    with pytest.raises(ModelError, match=sentence):
        ours(tmp_path / "tokenizer.gguf")
