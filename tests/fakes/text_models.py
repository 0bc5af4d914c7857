"""Small real tokenizers of the two kinds that language models have, with a chat template, as the files an executor sends."""

from __future__ import annotations

import json
from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from tokenmill_scheduler.text.model import TextModel

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}\n"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}\n"
    "{{ raise_exception('unknown role ' + message['role']) }}{% endif %}\n"
    "{{ '[' + message['role'] + ']' + message['content'] + '\\n' }}{% endfor %}\n"
    "{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
)
_CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "hello world, hello there",
    "你好世界 hello 你好",
    "stop! STOP. ###",
    "naïve café",
]


@cache
def byte_level_tokenizer() -> Tokenizer:
    """Byte-level BPE (GPT-2, Llama 3, SmolLM, Qwen): ids 0 and 1 are `<s>` and `</s>`; an emoji takes four tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<s>", "</s>"], show_progress=False
    )
    tokenizer.train_from_iterator(_CORPUS * 4, trainer)
    tokenizer.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


@cache
def sentencepiece_tokenizer() -> Tokenizer:
    """SentencePiece BPE with byte fallback and a dropped leading space (Llama 2, Mistral)."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdehlorwt"]
    merges = [("▁", "a"), ("▁", "h"), ("▁h", "e"), ("l", "l"), ("▁he", "ll"), ("▁hell", "o"), ("▁", "▁"), ("▁", "w")]
    tokens += [left + right for left, right in merges]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def model_files(tokenizer: Tokenizer, chat_template: str | None = CHAT_TEMPLATE) -> dict[str, bytes]:
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>", "special": True}, "chat_template": chat_template}
    return {"tokenizer.json": tokenizer.to_str().encode(), "tokenizer_config.json": json.dumps(config).encode()}


@cache
def byte_level_model() -> TextModel:
    return TextModel(model_files(byte_level_tokenizer()))


@cache
def sentencepiece_model() -> TextModel:
    return TextModel(model_files(sentencepiece_tokenizer()))
