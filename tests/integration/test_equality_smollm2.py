"""SmolLM2-135M-Instruct from its GGUF file: weights, logits and greedy tokens equal those of transformers on the same file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenmill_executor.model.loading import LoadSettings, make_runner
from tokenmill_executor.model.runner import TorchRunner
from tokenmill_executor.model.weights import load_checkpoint
from tokenmill_executor.runner import SamplingParams

from tests.fakes.batches import Blocks, Track
from tests.fakes.models import greedy_choices, smollm2_path, transformers_smollm2

NUM_BLOCKS = 160
BLOCK_SIZE = 16
NEW_TOKENS = 32
PROMPTS = [
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
    "def fibonacci(n):\n    '''Returns the n-th Fibonacci number.'''\n",
    "Once upon a time, in a village by the sea, there lived an old clockmaker who had never once been late. One morning",
    "1, 1, 2, 3, 5, 8, 13,",
]


class Loaded:
    """The runner, the tokenizer and the model of transformers, whose state dict transformers itself read from the file."""

    def __init__(self, path: Path) -> None:
        self.checkpoint = load_checkpoint(path)
        self.runner = make_runner(self.checkpoint, LoadSettings(device="cpu", dtype="float32"))
        self.tokenizer = Tokenizer.from_str(self.runner.tokenizer_files()["tokenizer.json"].decode())
        self.oracle, self.oracle_state = transformers_smollm2(path)
        self.prompts = [self.tokenizer.encode(text).ids for text in PROMPTS]

    def greedy(self, tokens: list[int], prompt_len: int) -> list[int]:
        """What transformers chooses after the prompt and each token behind it: those tokens themselves if they are greedy."""
        return greedy_choices(self.oracle, tokens, prompt_len)


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    return Loaded(smollm2_path())


def generate(runner: TorchRunner, blocks: Blocks, tracks: list[Track], chunk: int, count: int = NEW_TOKENS) -> None:
    """All together, `chunk` tokens of a prompt a step, until each has `count` more."""
    ends = [len(track.tokens) + count for track in tracks]
    while going := [track for track, end in zip(tracks, ends, strict=True) if len(track.tokens) < end]:
        advances = [(track, min(chunk, len(track.tokens) - track.computed)) for track in going]
        sampling = [track for track, count in advances if track.computed + count == len(track.tokens)]
        for track, token in zip(sampling, runner.step(blocks.batch(advances)).token_ids, strict=True):
            track.tokens.append(token)


def test_weights_equal_those_that_transformers_reads(loaded: Loaded) -> None:
    tensors = loaded.checkpoint.tensors
    assert set(tensors) == set(loaded.oracle_state)
    for name, expected in loaded.oracle_state.items():
        assert torch.equal(tensors[name], expected), name


def test_greedy_tokens_equal_in_one_batch_of_chunks(loaded: Loaded) -> None:
    blocks = Blocks(NUM_BLOCKS, BLOCK_SIZE)
    loaded.runner.allocate(NUM_BLOCKS, BLOCK_SIZE)
    tracks = [blocks.track(ids) for ids in loaded.prompts]
    generate(loaded.runner, blocks, tracks, chunk=7)
    for track, ids in zip(tracks, loaded.prompts, strict=True):
        assert track.tokens[len(ids) :] == loaded.greedy(track.tokens, len(ids))


def test_c67_a_greedy_request_among_15_others_on_the_real_model(loaded: Loaded) -> None:
    blocks = Blocks(NUM_BLOCKS, BLOCK_SIZE, seed=1)
    loaded.runner.allocate(NUM_BLOCKS, BLOCK_SIZE)
    others = [blocks.track([*loaded.prompts[row % 4], row], SamplingParams(99, seed=row)) for row in range(15)]
    watched = blocks.track(loaded.prompts[0])
    generate(loaded.runner, blocks, [*others[:7], watched, *others[7:]], chunk=12, count=16)
    prompt_len = len(loaded.prompts[0])
    assert watched.tokens[prompt_len:] == loaded.greedy(watched.tokens, prompt_len)


def test_log_probabilities_equal_those_of_transformers(loaded: Loaded) -> None:
    blocks = Blocks(NUM_BLOCKS, BLOCK_SIZE, seed=2)
    loaded.runner.allocate(NUM_BLOCKS, BLOCK_SIZE)
    ids = loaded.prompts[2]
    track = blocks.track(ids, SamplingParams(99, seed=0, temperature=0.7, top_p=0.9, logprobs=10))
    found = loaded.runner.step(blocks.batch([(track, len(ids))])).logprobs[0]
    with torch.inference_mode():
        expected = loaded.oracle(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
    values, tokens = expected.topk(10)
    assert [token for token, _ in found.top] == tokens.tolist()
    assert [value for _, value in found.top] == pytest.approx(values.tolist(), abs=1e-3)


def test_the_chat_template_is_the_models(loaded: Loaded) -> None:
    config = json.loads(loaded.runner.tokenizer_files()["tokenizer_config.json"])
    assert "<|im_start|>" in config["chat_template"]
    assert loaded.runner.description.eos_token_ids == (loaded.tokenizer.token_to_id("<|im_end|>"),)
