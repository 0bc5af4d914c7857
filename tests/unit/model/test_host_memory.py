"""The host tier with real models: greedy tokens are the same with it, without it and when it is too small, while sequences are
given up and taken up again in a pool that holds half of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from tokenmill_executor.engine import Engine
from tokenmill_executor.host_tier import HostTier
from tokenmill_executor.model import load_runner
from tokenmill_executor.model.host_memory import TorchHostMemory, _slots_of_piece
from tokenmill_executor.runner import DeviceLost

from tests.fakes.models import random_model
from tests.unit.cpu.small_models import needs_kernels
from tests.unit.engine.plans import Driver, admission, hasher

OUTPUT = 20
PATHS = [
    pytest.param({"dtype": "float32", "block_size": 4}, id="torch"),
    pytest.param({"dtype": "bfloat16", "block_size": 16}, id="kernels", marks=needs_kernels),
    pytest.param({"dtype": "bfloat16", "block_size": 16, "kv_cache_dtype": "int8"}, id="kernels-int8", marks=needs_kernels),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    random_model("llama").save_pretrained(path)
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(path / "tokenizer.json"))
    return path


def take_turns(driver: Driver, prompts: list[list[int]]) -> tuple[list[list[int]], int]:
    """Each in turn gets 6 tokens and is given up for the next. → output tokens, and how many tokens were found in the cache."""
    outputs: list[list[int]] = [[] for _ in prompts]
    cached, sequence_id = 0, 0
    while any(len(output) < OUTPUT for output in outputs):
        for prompt, output in zip(prompts, outputs, strict=True):
            if len(output) == OUTPUT:
                continue
            sequence_id += 1
            admit = [admission(sequence_id, prompt, output, OUTPUT, temperature=0.0, ignore_eos=True)]
            for _ in range(6):
                result = driver.plan({sequence_id: 64}, admit)
                assert not result.faults
                admit, cached = [], cached + sum(result.num_cached)
                output += result.token_ids
            driver.plan({}, release=[sequence_id])
    return outputs, cached


@pytest.mark.parametrize("settings", PATHS)
def test_c19_tokens_after_swaps_are_those_of_a_run_that_computes_all(
    folder: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A model as small as this may compute a block sooner than it is copied.
    monkeypatch.setattr(HostTier, "_copying_is_cheaper", lambda _: True)
    size = settings["block_size"]
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(3, 211, (40 + length,), generator=generator).tolist() for length in range(4)]
    found = {}
    for num_host_blocks in (None, 0, 3, 64):
        runner = load_runner(folder, device="cpu", threads=1, max_model_len=128, **settings)
        caching = None if num_host_blocks is None else hasher(size)
        engine = Engine(runner, 96 // size, size, max_num_seqs=4, hasher=caching, num_host_blocks=num_host_blocks or 0)
        driver = Driver(engine)
        found[num_host_blocks] = take_turns(driver, prompts)
        tier = driver.engine.host_tier
        assert tier is None or tier.copied_out > 0
    assert found[0][0] == found[3][0] == found[64][0] == found[None][0]
    # The pool alone keeps little of a sequence until its next turn, enough slots keep all but the last tokens.
    assert found[None][1] == 0 <= found[0][1] < found[64][1]
    assert found[64][1] >= 3 * 4 * 32


@pytest.mark.parametrize(("odd", "widest"), [(5, torch.uint8), (8, torch.int64)], ids=["bytes", "eight-bytes"])
def test_blocks_go_out_and_come_back_byte_by_byte(odd: int, widest: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when there are more of them than are gathered at once, and than lie in one piece of host memory."""
    monkeypatch.setattr("tokenmill_executor.model.host_memory._slots_of_piece", lambda *_: 4)
    storage = [torch.randint(0, 255, (12, 3, odd), dtype=torch.uint8), torch.randn(12, 6), torch.randn(12, 2, 4).bfloat16()]
    before = [tensor.clone() for tensor in storage]
    memory = TorchHostMemory(storage, 9, torch.device("cpu"))
    assert memory._staging.dtype == widest
    memory._staging = memory._staging[:2]
    memory.copy_out([11, 0, 5, 6, 2], [8, 0, 3, 1, 4])
    for tensor in storage:
        tensor.zero_()
    memory.copy_in([3, 8, 4], [1, 2, 3])
    for tensor, old in zip(storage, before, strict=True):
        assert torch.equal(tensor[1:4], old[[5, 11, 2]])
        assert not tensor[4:].any()
    blocks, seconds = memory.take_measured()
    assert (blocks, seconds > 0) == (8, True)
    assert memory.take_measured() == (0, 0.0)


def test_after_a_copy_that_failed_the_cache_is_not_trusted() -> None:
    memory = TorchHostMemory([torch.zeros(4, 2)], 2, torch.device("cpu"))
    with pytest.raises(DeviceLost, match="KV cache and host memory"):
        memory.copy_out([9], [0])


def test_more_host_memory_than_there_is_is_refused() -> None:
    with pytest.raises(MemoryError, match="bytes of host memory cannot be had"):
        TorchHostMemory([torch.zeros(4, 2)], 1 << 56, torch.device("cpu"))


def test_pinned_memory_comes_in_pieces_that_rounding_up_costs_little() -> None:
    """Torch pins a power of two; and what the machine has not is not tried."""
    cuda = torch.device("cuda")
    assert _slots_of_piece(1_000, 2 << 20, cuda) == 512
    assert _slots_of_piece(1, 2 << 30, cuda) == 1
    with pytest.raises(MemoryError, match="more than the machine has"):
        _slots_of_piece(1 << 40, 2 << 20, cuda)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_copies_and_steps_take_effect_in_the_order_they_are_asked_for() -> None:
    """What leaves is overwritten at once by the stream of the steps, and what comes back is read by it at once."""
    device = torch.device("cuda")
    storage = [torch.zeros(64, 16, 4096, dtype=torch.bfloat16, device=device) for _ in range(8)]
    memory = TorchHostMemory(storage, 64, device)
    blocks = list(range(64))
    for turn in range(20):
        for place, tensor in enumerate(storage):
            tensor.copy_(torch.arange(64, device=device)[:, None, None] + turn + place)
        expected = [tensor.clone() for tensor in storage]
        memory.copy_out(blocks, blocks[::-1])
        for tensor in storage:
            tensor.fill_(-1.0)
        memory.copy_in(blocks[::-1], blocks)
        assert all(torch.equal(tensor, old) for tensor, old in zip(storage, expected, strict=True))
    torch.cuda.synchronize(device)
    assert memory.take_measured()[0] == 20 * 2 * 64
