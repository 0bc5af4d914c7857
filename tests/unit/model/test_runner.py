"""The runner over small random models: what the engine relies on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from tokenmill_executor.model import load_runner
from tokenmill_executor.model.config import ModelError
from tokenmill_executor.model.memory import largest_batch
from tokenmill_executor.model.runner import TorchRunner
from tokenmill_executor.runner import Batch, DeviceLost, Runner, SamplingParams, StepOutput
from tokenmill_executor.sampling import TorchDraws

from tests.fakes.batches import Blocks, Track
from tests.fakes.models import greedy_tokens, random_model

BLOCK_SIZE = 8
NUM_BLOCKS = 128
POISON = 77


class Bench:
    """A runner on a saved random model, with blocks to run sequences in. The embedding of token POISON may be no number."""

    def __init__(self, folder: Path, family: str = "llama", poisoned: bool = False) -> None:
        self.oracle = random_model(family)
        if poisoned:
            with torch.no_grad():
                self.oracle.get_input_embeddings().weight[POISON] = torch.nan
        self.oracle.save_pretrained(folder)
        Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(folder / "tokenizer.json"))
        self.runner: TorchRunner = load_runner(folder, device="cpu", threads=1, dtype="float32")
        self.runner.allocate(NUM_BLOCKS, BLOCK_SIZE)
        self.blocks = Blocks(NUM_BLOCKS, BLOCK_SIZE)

    def step(self, *advances: tuple[Track, int]) -> StepOutput:
        """Appends what was sampled."""
        sampling = [track for track, count in advances if track.computed + count == len(track.tokens)]
        output = self.runner.step(self.blocks.batch(advances))
        for track, token in zip(sampling, output.token_ids, strict=True):
            track.tokens.append(token)
        return output

    def generate(self, tracks: list[Track], count: int) -> list[list[int]]:
        lengths = [len(track.tokens) for track in tracks]
        self.step(*((track, length) for track, length in zip(tracks, lengths, strict=True)))
        for _ in range(count - 1):
            self.step(*((track, 1) for track in tracks))
        return [track.tokens[length:] for track, length in zip(tracks, lengths, strict=True)]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


@pytest.fixture
def poisoned_bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path, poisoned=True)


def prompt(length: int, seed: int) -> list[int]:
    tokens = np.random.default_rng(seed).integers(3, 211, length)
    return [3 if token == POISON else int(token) for token in tokens]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_c67_a_greedy_request_alone_and_among_15_others(tmp_path: Path, family: str) -> None:
    bench = Bench(tmp_path, family)
    expected = greedy_tokens(bench.oracle, prompt(19, 0), 24)
    alone = bench.generate([bench.blocks.track(prompt(19, 0))], 24)[0]
    others = [bench.blocks.track(prompt(3 + 4 * seed, seed)) for seed in range(1, 16)]
    among = bench.generate([*others[:7], bench.blocks.track(prompt(19, 0)), *others[7:]], 24)[7]
    assert alone == expected
    assert among == expected


def test_c28_a_seeded_request_in_chunks_and_after_a_preemption(bench: Bench) -> None:
    params = SamplingParams(max_tokens=99, seed=11, temperature=1.2, top_p=0.95, presence_penalty=0.6, repetition_penalty=1.1)
    expected = bench.generate([bench.blocks.track(prompt(30, 1), params)], 20)[0]
    chunked = bench.blocks.track(prompt(30, 1), params)
    other = bench.blocks.track(prompt(9, 2))
    bench.step((chunked, 13), (other, 9))
    bench.step((other, 1), (chunked, 10))
    bench.step((chunked, 7))
    for _ in range(8):
        bench.step((chunked, 1))
    bench.blocks.free(chunked)
    resumed = bench.blocks.track(chunked.tokens, params, sequence_id=2, prompt=30)
    bench.step((resumed, 25))
    bench.step((resumed, 14))
    for _ in range(10):
        bench.step((resumed, 1))
    assert resumed.tokens[30:] == expected


def test_a_poisoned_sequence_fails_alone_and_its_blocks_can_be_used_again(poisoned_bench: Bench) -> None:
    bench = poisoned_bench
    healthy = bench.blocks.track(prompt(11, 3))
    expected = greedy_tokens(bench.oracle, prompt(11, 3), 4)
    poisoned = bench.blocks.track([4, POISON, *prompt(20, 4)])
    bench.step((healthy, 11))
    output = bench.step((poisoned, 22), (healthy, 1))
    assert list(output.errors) == [0]
    bench.blocks.free(poisoned)
    # Blocks come from the end of the free list: these are the poisoned ones, and hold fewer tokens than before.
    heir = bench.blocks.track(prompt(17, 5))
    bench.step((heir, 17), (healthy, 1))
    bench.step((heir, 1), (healthy, 1))
    assert healthy.tokens[11:] == expected
    assert heir.tokens[17:] == greedy_tokens(bench.oracle, prompt(17, 5), 2)


def test_a_sequence_poisoned_in_mid_prompt_raises_and_leaves_earlier_steps_alone(poisoned_bench: Bench) -> None:
    """The engine then runs parts of the batch again to find it."""
    bench = poisoned_bench
    healthy = bench.blocks.track(prompt(11, 3))
    bench.step((healthy, 11))
    poisoned = bench.blocks.track([4, POISON, *prompt(20, 4)])
    batch = bench.blocks.batch([(poisoned, 15), (healthy, 1)])
    with pytest.raises(ArithmeticError, match="1 sequences in mid-prompt"):
        bench.runner.step(batch)
    healthy.computed -= 1
    bench.step((healthy, 1))
    assert healthy.tokens[11:] == greedy_tokens(bench.oracle, prompt(11, 3), 2)


def test_memory_may_be_populated_between_any_two_steps(bench: Bench) -> None:
    expected = greedy_tokens(bench.oracle, prompt(19, 0), 12)
    track = bench.blocks.track(prompt(19, 0))
    tokens = bench.generate([track], 6)[0]
    while bench.runner.populate_some():
        pass
    tokens += [token for _ in range(6) for token in bench.step((track, 1)).token_ids]
    assert tokens == expected
    assert not bench.runner.populate_some()


def test_a_step_in_which_nothing_samples(bench: Bench) -> None:
    output = bench.step((bench.blocks.track(prompt(9, 1)), 4))
    assert (output.token_ids, output.errors) == ([], {})
    assert output.forward_s > 0


@pytest.mark.parametrize("lost", [True, False])
def test_an_error_of_a_device_beyond_use_is_a_lost_device(bench: Bench, monkeypatch: pytest.MonkeyPatch, lost: bool) -> None:
    def fail(batch: Batch) -> torch.Tensor:
        raise RuntimeError("illegal memory access")

    monkeypatch.setattr(bench.runner._model, "forward", fail)
    monkeypatch.setattr("tokenmill_executor.model.runner.is_lost", lambda device: lost)
    with pytest.raises(DeviceLost if lost else RuntimeError, match="illegal memory access"):
        bench.step((bench.blocks.track([1, 2]), 2))


def test_the_description_and_sizes(bench: Bench) -> None:
    runner: Runner = bench.runner
    description = runner.description
    assert (description.vocab_size, description.max_model_len, description.eos_token_ids) == (211, 256, (2,))
    assert (description.device, description.dtype) == ("cpu", "float32")
    assert runner.block_bytes(16) == 2 * 3 * 2 * 64 * 4 * 16
    assert 0 < runner.available_bytes() <= 4 << 30
    assert list(runner.tokenizer_files()) == ["tokenizer.json"]


def test_what_draws_is_compiled_with_the_cache_and_not_in_service(bench: Bench) -> None:
    drawn: list[bool] = []

    class WatchedDraws(TorchDraws):
        def draw(self, *given: Any) -> torch.Tensor:
            drawn.append(True)
            return super().draw(*given)

    runner = TorchRunner(bench.runner._model, bench.runner.description, {}, torch.device("cpu"), lambda: 0, make_draws=WatchedDraws)
    runner.allocate(NUM_BLOCKS, BLOCK_SIZE)
    assert drawn == [True]


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nSee documentation"),
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
    ids=["torch", "the driver", "cuBLAS"],
)
def test_a_device_without_room_is_told_in_one_line_at_the_start(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def allocate(num_blocks: int, block_size: int) -> None:
        raise error

    monkeypatch.setattr(bench.runner._model, "allocate", allocate)
    with pytest.raises(MemoryError, match=r"^cpu: .*(out of memory|ALLOC_FAILED)[^\n]*$"):
        bench.runner.allocate(NUM_BLOCKS, BLOCK_SIZE)
    monkeypatch.setattr(bench.runner, "_measure_memory", lambda: allocate(1, 1))
    with pytest.raises(MemoryError):
        bench.runner.available_bytes()


def test_settings_reach_the_runner(bench: Bench, tmp_path: Path) -> None:
    runner = load_runner(tmp_path, device="cpu", dtype="bfloat16", max_model_len=100, kv_cache_memory_bytes=12345)
    assert (runner.description.dtype, runner.description.max_model_len, runner.available_bytes()) == ("bfloat16", 100, 12345)
    assert runner.block_bytes(16) == 2 * 3 * 2 * 64 * 2 * 16


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"max_model_len": 257}, "made for at most 256 tokens"),
        ({"dtype": "float16"}, "choose auto, float32 or bfloat16"),
        ({"device": "tpu"}, "choose auto, cpu or cuda"),
    ],
)
def test_an_operators_mistake_is_one_sentence(bench: Bench, tmp_path: Path, settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        load_runner(tmp_path, **{"device": "cpu", **settings})


@pytest.mark.parametrize(("tokens", "sequences", "length"), [(64, 4, 16), (100, 200, 1), (4096, 2, 256)])
def test_the_trial_step_is_as_large_as_allowed_and_runs(bench: Bench, tokens: int, sequences: int, length: int) -> None:
    batch = largest_batch(tokens, sequences, 256)
    assert np.diff(batch.query_starts).tolist() == [length] * min(sequences, tokens)
    assert len(np.unique(batch.slots)) == batch.slots.size
    bench.runner.allocate(int(batch.block_tables.max()) + 1, 16)
    assert len(bench.runner.step(batch).token_ids) == min(sequences, tokens)


def test_importing_the_package_imports_no_torch() -> None:
    """The simulated executor runs without it."""
    code = "import sys, tokenmill_executor.model, tokenmill_executor.model.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
