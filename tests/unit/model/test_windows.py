"""Sliding windows with real models, through the engine: the tokens of transformers, while blocks left behind serve others.

Sequences are several times as long as the windows, cut into random chunks, decoded together, given up and taken up again.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from tokenmill_executor.attention import reference
from tokenmill_executor.attention.layout import cache_layout
from tokenmill_executor.engine import Engine
from tokenmill_executor.model import load_runner
from tokenmill_executor.model.config import ModelError
from tokenmill_executor.runner import BlockGroup

from tests.fakes.models import greedy_tokens, random_model
from tests.unit.engine.plans import Driver, admission

BLOCK_SIZE = 4
LENGTHS = (61, 9, 33, 47)
OUTPUT = 24
QWEN_KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("mistral", {"sliding_window": 10}),
    "gemma3": ("gemma3_text", {"sliding_window": 6, "num_hidden_layers": 7}),
    "qwen2": ("qwen2", {"use_sliding_window": True, "sliding_window": 7, "layer_types": QWEN_KINDS}),
    "qwen3": ("qwen3", {"use_sliding_window": True, "sliding_window": 13, "layer_types": QWEN_KINDS}),
}


def save(folder: Path, family: str, changes: dict[str, Any]) -> Any:
    oracle = random_model(family, **changes)
    oracle.save_pretrained(folder)
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(folder / "tokenizer.json"))
    return oracle


def prompts(lengths: Sequence[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, 211, (length,), generator=generator).tolist() for length in lengths]


class Served:
    """Sequences in an engine whose pool is just large enough, told of in random plans."""

    def __init__(self, folder: Path, blocks: int, seed: int, **settings: Any) -> None:
        runner = load_runner(folder, dtype="float32", device="cpu", threads=1, block_size=BLOCK_SIZE, **settings)
        self.groups = runner.description.block_groups
        self.driver = Driver(Engine(runner, blocks, BLOCK_SIZE, max_num_seqs=8))
        self.rng = random.Random(seed)
        self.held = 0

    def generate(self, prompts: Sequence[list[int]], count: int, preempt: float = 0.1) -> list[list[int]]:
        rng = self.rng
        outputs: list[list[int]] = [[] for _ in prompts]
        ids: dict[int, int] = {}
        next_id = 1
        while any(len(output) < count for output in outputs):
            admit, release = [], []
            for index, prompt in enumerate(prompts):
                if index in ids and rng.random() < preempt:
                    release.append(ids.pop(index))
                elif index not in ids and len(outputs[index]) < count:
                    ids[index], next_id = next_id, next_id + 1
                    admit.append(admission(ids[index], prompt, outputs[index], count, temperature=0.0, ignore_eos=True))
            advance = {sequence_id: rng.choice([1, 3, 8, 17]) for sequence_id in ids.values()}
            result = self.driver.plan(advance, admit, release)
            assert not result.faults
            self.held = max(self.held, result.blocks.held)
            tokens = iter(result.token_ids)
            names = {sequence_id: index for index, sequence_id in ids.items()}
            for sequence_id, sampled, finish in zip(result.sequence_ids, result.num_sampled, result.finishes, strict=True):
                outputs[names[sequence_id]] += [next(tokens) for _ in range(sampled)]
                if finish:
                    del ids[names[sequence_id]]
        assert result.blocks.held == 0
        return outputs

    def most_blocks(self, length: int, step: int) -> int:
        return sum(group.most_blocks(length, step, BLOCK_SIZE) for group in self.groups)


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_past_the_window_equal_those_of_transformers(tmp_path: Path, name: str) -> None:
    family, changes = FAMILIES[name]
    oracle = save(tmp_path, family, changes)
    served = Served(tmp_path, 600, seed=1)
    given = prompts(LENGTHS)
    assert served.generate(given, OUTPUT) == [greedy_tokens(oracle, prompt, OUTPUT) for prompt in given]
    whole = len(served.groups) * sum(-(-(length + OUTPUT) // BLOCK_SIZE) for length in LENGTHS)
    bound = sum(served.most_blocks(length + OUTPUT, 17) for length in LENGTHS)
    assert served.held <= bound < whole


def test_a_window_and_sinks_by_setting_are_those_of_a_mask(tmp_path: Path) -> None:
    """Each token sees the last 8 positions and the first 3, of every layer, on a model that is made to see all."""
    oracle = save(tmp_path, "llama", {})
    served = Served(tmp_path, 60, seed=2, sliding_window=8, attention_sinks=3)
    assert served.groups == (BlockGroup(8, 3),)
    (prompt,) = prompts([40])
    assert served.generate([prompt], 12) == [_greedy_under_mask(oracle, prompt, 12, window=8, sinks=3)]
    assert served.held <= served.most_blocks(52, 17) < 13


def _greedy_under_mask(oracle: Any, prompt: list[int], count: int, window: int, sinks: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        places = torch.arange(len(tokens))
        distance = places[:, None] - places
        seen = (distance >= 0) & ((distance < window) | (places < sinks))
        mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]
        with torch.inference_mode():
            tokens.append(int(oracle(torch.tensor([tokens]), attention_mask=mask).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def test_a_windows_layers_by_setting_keep_their_own_if_it_is_shorter(tmp_path: Path) -> None:
    save(tmp_path, "qwen3", FAMILIES["qwen3"][1])
    assert Served(tmp_path, 60, 0, sliding_window=20).groups == (BlockGroup(13), BlockGroup(13), BlockGroup(20))
    assert Served(tmp_path, 60, 0, sliding_window=8).groups == (BlockGroup(8),)
    assert Served(tmp_path, 60, 0, max_model_len=13).groups == (BlockGroup(),)
    with pytest.raises(ModelError, match="sinks are for layers with a sliding window"):
        Served(tmp_path, 60, 0, max_model_len=13, attention_sinks=1)


def test_a_chunk_in_pieces_is_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long chunks are computed, so that a step's memory is bounded."""
    oracle = save(tmp_path, "gemma3_text", FAMILIES["gemma3"][1])
    monkeypatch.setattr(reference, "_SCORES_AT_ONCE", 3 * 61 * 5)
    given = prompts([61])
    assert Served(tmp_path, 300, seed=3).generate(given, 4, preempt=0.0) == [greedy_tokens(oracle, given[0], 4)]


def test_layers_of_a_kind_form_groups_as_large_as_the_rarer_kind() -> None:
    """Gemma 3 1B: 22 layers with a window, 4 without; the last group has two places to spare."""
    layout = cache_layout([None if (layer + 1) % 6 == 0 else 512 for layer in range(26)], sinks=4)
    assert layout.layers_per_group == 4
    assert layout.groups == (*[BlockGroup(512, 4)] * 6, BlockGroup())
    assert len(set(layout.places)) == 26
    assert [layout.groups[layout.places[layer][0]].sliding_window for layer in (4, 5, 6, 11, 24)] == [512, None, 512, None, 512]
    assert cache_layout([7, 7]).places == ((0, 0), (0, 1))
