"""Tokenizer files, prompts and chat templates."""

from __future__ import annotations

import json
import re
import threading
from typing import Any

import pytest
from tokenmill_scheduler.text.chat import ChatTemplate
from tokenmill_scheduler.text.model import TextModel

from tests.fakes.text_models import byte_level_model, byte_level_tokenizer, model_files

USER = [{"role": "user", "content": "hello 你好"}]


def render(source: str, messages: list[dict[str, str]] | None = None, **tokens: str) -> str:
    return ChatTemplate(source, tokens).render(USER if messages is None else messages)


def with_config(config: dict[str, Any]) -> TextModel:
    files = model_files(byte_level_tokenizer())
    return TextModel(files | {"tokenizer_config.json": json.dumps(config).encode()})


def test_text_gets_the_special_tokens_of_the_post_processor() -> None:
    assert byte_level_model().encode("hello") == [0, *byte_level_tokenizer().encode("hello", add_special_tokens=False).ids]


def test_chat_begins_once_and_ends_with_the_generation_prompt() -> None:
    token_ids = byte_level_model().encode_chat(USER)
    assert token_ids.count(0) == 1
    assert token_ids[0] == 0
    assert byte_level_tokenizer().decode(token_ids) == "[user]hello 你好\n[assistant]"


def test_a_template_refuses_in_its_own_words() -> None:
    with pytest.raises(ValueError, match="refuses these messages: unknown role pirate"):
        byte_level_model().encode_chat([{"role": "pirate", "content": "arr"}])


def test_without_a_template_chat_is_refused_with_advice() -> None:
    model = TextModel(model_files(byte_level_tokenizer(), chat_template=None))
    assert not model.has_chat_template
    with pytest.raises(ValueError, match="send the prompt as text or token ids"):
        model.encode_chat(USER)


def test_a_broken_template_leaves_text_prompts_working() -> None:
    model = with_config({"chat_template": "{% if %}"})
    assert model.encode("hello")
    with pytest.raises(ValueError, match="chat template is broken"):
        model.encode_chat(USER)


def test_named_templates_and_plain_special_tokens() -> None:
    templates = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "{{ eos_token }}yes"}]
    model = with_config({"eos_token": "</s>", "chat_template": templates})
    assert model.encode_chat(USER) == [1, *byte_level_tokenizer().encode("yes", add_special_tokens=False).ids]


def test_whitespace_loops_and_json_are_as_transformers_has_them() -> None:
    source = "{% for m in messages %}\n    {% if loop.first %}{% continue %}{% endif %}\n{{ m | tojson }}\n{% endfor %}"
    assert render(source, [*USER, {"role": "user", "content": "<é>"}]) == '{"role": "user", "content": "<é>"}\n'


TEMPLATES = {
    "chatml": (
        "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
        "{{ '<|im_start|>system\\nYou are a helpful assistant<|im_end|>\\n' }}{% endif %}"
        "{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    ),
    "inst": (
        "{{ bos_token }}{%- for message in messages -%}\n"
        "    {%- if message.role == 'user' %}\n{{ '[INST] ' ~ message.content | trim ~ ' [/INST]' }}\n"
        "    {%- else %} {{ message.content }}{{ eos_token }}{% endif -%}\n{%- endfor -%}\n"
    ),
    "namespace": (
        "{% set ns = namespace(seen='') %}\n{% for m in messages %}\n"
        "    {% if m.role == 'system' %}{% set ns.seen = m.content %}{% continue %}{% endif %}\n"
        "    {% generation %}{{ m.content }}{% endgeneration %}|{{ ns.seen }}|{{ m | tojson(indent=2) }}\n{% endfor %}\n"
        "{{ tools is none }} {{ strftime_now('%Y') | length }} {{ undefined_name }}"
    ),
}


@pytest.mark.parametrize("source", TEMPLATES.values(), ids=TEMPLATES)
def test_templates_render_as_transformers_renders_them(source: str) -> None:
    """`transformers` is what models are trained with; the scheduler itself must run without it."""
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = [
        {"role": "system", "content": "Be <brief> & é"},
        {"role": "user", "content": "  hi 你好\n"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "🎉"},
    ]
    tokens: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>"}
    theirs: Any = render_jinja_template([messages], chat_template=source, add_generation_prompt=True, **tokens)
    texts, _ = theirs
    assert ChatTemplate(source, tokens).render(messages) == texts[0]


def test_generation_marks_show_what_they_hold() -> None:
    assert render("{% generation %}x{{ bos_token }}{% endgeneration %}", bos_token="<s>") == "x<s>"


def test_a_template_can_tell_the_date() -> None:
    assert re.fullmatch(r"\d{4}-\d\d", render("{{ strftime_now('%Y-%m') }}"))


@pytest.mark.parametrize("source", ["{{ messages.append(1) }}", "{{ messages.__class__.__mro__ }}", "{{ 1 / 0 }}"])
def test_templates_run_in_a_sandbox(source: str) -> None:
    with pytest.raises(ValueError, match="refuses these messages"):
        render(source)


def test_a_prompt_is_never_cut_in_silence() -> None:
    tokenizer = json.loads(byte_level_tokenizer().to_str())
    tokenizer["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    model = TextModel({"tokenizer.json": json.dumps(tokenizer).encode()})
    assert len(model.encode("hello " * 10)) > 4


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "no tokenizer.json"),
        ({"tokenizer.json": b"{"}, "tokenizer.json cannot be read"),
        (
            {"tokenizer.json": byte_level_tokenizer().to_str().encode(), "tokenizer_config.json": b"{"},
            "tokenizer_config.json cannot",
        ),
        ({"tokenizer.json": byte_level_tokenizer().to_str().encode(), "tokenizer_config.json": b"[]"}, "no JSON object"),
    ],
)
def test_files_at_fault_are_named(files: dict[str, bytes], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        TextModel(files)


def test_other_threads_run_while_a_long_text_is_tokenised() -> None:
    model, ended = byte_level_model(), threading.Event()

    def encode() -> None:
        model.encode("ab 😀 " * 50_000)
        ended.set()

    thread = threading.Thread(target=encode)
    thread.start()
    turns = 0
    while not ended.wait(0.001):
        turns += 1
    thread.join()
    # One that keeps Python's lock leaves two or three.
    assert turns > 10
