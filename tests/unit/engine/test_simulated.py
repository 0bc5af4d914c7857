"""The simulated runner: its formula, its cost model, its tokenizer."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Sequence

import pytest
from jinja2 import Environment
from tokenizers import Tokenizer
from tokenmill_executor.engine import Engine
from tokenmill_executor.records import SequenceFinish
from tokenmill_executor.simulated import SimulatedRunner, StepCost
from tokenmill_executor.simulated_tokenizer import EOS_TOKEN_ID, VOCAB_SIZE

from tests.unit.engine.plans import Driver, admission


def foretold(prompt: Sequence[int], seed: int, position: int) -> int:
    """The formula, written down a second time from the module's docstring."""
    digest = zlib.crc32(b"".join(struct.pack("<I", token) for token in prompt))
    return 32 + zlib.crc32(struct.pack("<Q", seed) + struct.pack("<Q", position), digest) % 95


def make(runner: SimulatedRunner) -> Driver:
    return Driver(Engine(runner, 64, 4, 8))


def test_tokens_are_the_formula_of_prompt_seed_and_position() -> None:
    driver = make(SimulatedRunner())
    prompts = {1: [1, 2, 3], 2: [1, 2, 4]}
    results = [driver.plan({1: 9, 2: 9}, [admission(index, prompt) for index, prompt in prompts.items()])]
    results += [driver.plan({1: 1, 2: 1}) for _ in range(5)]
    for row, prompt in enumerate(prompts.values()):
        assert [result.token_ids[row] for result in results] == [foretold(prompt, 0, position) for position in range(3, 9)]


def test_tokens_do_not_depend_on_chunks_or_a_resumption() -> None:
    prompt = list(b"a prompt of some length")
    whole = [foretold(prompt, 0, len(prompt) + index) for index in range(4)]
    driver = make(SimulatedRunner())
    driver.plan({1: 5}, [admission(1, prompt)])
    assert driver.plan({1: 99}).token_ids == whole[:1]
    assert driver.plan({2: 99}, [admission(2, prompt, output=whole[:3])]).token_ids == whole[3:]


def test_no_end_of_sequence_unless_asked_for() -> None:
    def finishes(**params: object) -> list[int]:
        driver = make(SimulatedRunner(eos_every=3))
        driver.plan({1: 1}, [admission(1, [5], max_tokens=6, **params)])  # type: ignore[arg-type]
        return [finish for _ in range(5) for finish in driver.plan({1: 1}).finishes]

    none, stop, length = SequenceFinish.NONE, SequenceFinish.STOP, SequenceFinish.LENGTH
    assert finishes() == [none, stop, none, none, none]
    assert finishes(min_tokens=3) == [none, none, none, none, stop]
    assert finishes(ignore_eos=True) == [none, none, none, none, length]


def test_a_step_takes_what_the_cost_model_says() -> None:
    slept: list[float] = []
    driver = make(SimulatedRunner(StepCost(step_s=100.0, prefill_token_s=10.0, decode_token_s=1.0), sleep=slept.append))
    driver.plan({1: 4, 2: 2}, [admission(1, [1] * 4), admission(2, [2] * 5)])
    driver.plan({1: 1, 2: 3})
    driver.plan({1: 1, 2: 1})
    assert slept == [pytest.approx(160, abs=1), pytest.approx(131, abs=1), pytest.approx(102, abs=1)]


def test_the_tokenizer_gives_a_token_a_byte_and_back() -> None:
    files = SimulatedRunner().tokenizer_files()
    tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
    text = "Grüße, 世界 😀\n\x00\x7f"
    encoded = tokenizer.encode(text)
    assert encoded.ids == list(text.encode())
    assert tokenizer.decode(encoded.ids) == text
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    assert tokenizer.token_to_id(json.loads(files["tokenizer_config.json"])["eos_token"]) == EOS_TOKEN_ID
    assert tokenizer.encode("hi<|im_end|>").ids == [104, 105, 258]


def test_the_chat_template_writes_each_message_and_opens_the_answer() -> None:
    template = json.loads(SimulatedRunner().tokenizer_files()["tokenizer_config.json"])["chat_template"]
    text = Environment().from_string(template).render(messages=[{"role": "user", "content": "hi"}], add_generation_prompt=True)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_a_step_that_computes_the_poison_dies_and_no_other() -> None:
    deaths: list[str] = []
    driver = make(SimulatedRunner(poison_token=7, die=lambda: deaths.append("died")))
    driver.plan({1: 9}, [admission(1, [1, 2, 3])])
    driver.plan({1: 1})
    assert deaths == []
    driver.plan({1: 1, 2: 9}, [admission(2, [1, 7, 3])])
    assert deaths == ["died"]
