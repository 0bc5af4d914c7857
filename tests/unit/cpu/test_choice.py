"""When the kernels are chosen, when torch runs the model instead, and what the log and the operator are told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from tokenizers import Tokenizer, models
from tokenmill_executor.cpu import choice as choice_module
from tokenmill_executor.cpu import support
from tokenmill_executor.cpu.build import INSTRUCTION_SETS, BuildFailed, build
from tokenmill_executor.cpu.choice import CpuChoice, choose_kernels
from tokenmill_executor.cpu.library import REQUIRED_FLAGS, best_instruction_set, first_processor, processor_flags
from tokenmill_executor.cpu.memory import HugeArena
from tokenmill_executor.cpu.model import CpuModel
from tokenmill_executor.cpu.support import supports
from tokenmill_executor.model import load_runner
from tokenmill_executor.model.config import ModelError, RopeConfig
from tokenmill_executor.model.decoder import Decoder

from tests.fakes.models import random_model
from tests.unit.cpu.small_models import cpu_model, make_batch, needs_kernels, random_tensors, small_config

PLAIN = CpuChoice(max_model_len=64, block_size=16, quantization=None, kv_cache_dtype="auto")


@needs_kernels
def test_a_supported_model_gets_the_kernels() -> None:
    config = small_config()
    assert isinstance(choose_kernels(config, random_tensors(config), PLAIN), CpuModel)


def test_another_block_size_falls_back_and_says_so_once() -> None:
    with structlog.testing.capture_logs() as logs:
        assert choose_kernels(small_config(), {}, CpuChoice(64, 32, None, "auto")) is None
    assert [line["event"] for line in logs] == ["CPU kernels unused"]


def test_missing_kernels_fall_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice_module, "available", lambda: "not built")
    with structlog.testing.capture_logs() as logs:
        assert choose_kernels(small_config(), {}, PLAIN) is None
    assert logs[0]["reason"] == "not built"


@needs_kernels
@pytest.mark.parametrize(("block_size", "kv_cache_dtype", "reason"), [(8, "auto", "blocks of 16"), (16, "fp8", "no fp8 KV cache")])
def test_quantised_weights_that_the_kernels_cannot_run_are_an_error(block_size: int, kv_cache_dtype: str, reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        choose_kernels(small_config(), {}, CpuChoice(64, block_size, "int8", kv_cache_dtype))


@pytest.mark.parametrize(
    ("changes", "quantization", "reason"),
    [
        ({"sandwich_norms": True}, None, "norms, rotations and activation"),
        ({"norm_offset": 1.0}, None, "norms, rotations and activation"),
        ({"local_rope": RopeConfig()}, None, "norms, rotations and activation"),
        ({"activation": "gelu_pytorch_tanh"}, None, "norms, rotations and activation"),
        ({"attention_scale": 0.1}, None, "scores"),
        ({"embedding_scale": 2.0}, None, "embeddings"),
        ({"head_dim": 72}, None, "head size of 72"),
        ({"head_dim": 272}, None, "head size of 272"),
        ({"num_heads": 65, "num_kv_heads": 1}, None, "more than 64"),
        ({"hidden_size": 96}, "int8", "multiples of 64"),
        ({"intermediate_size": 33}, None, "multiples of 2"),
    ],
)
def test_shapes_without_kernels(changes: dict[str, object], quantization: str | None, reason: str) -> None:
    assert reason in str(supports(small_config(**changes), quantization=quantization))


def test_the_best_instruction_set_of_a_processor() -> None:
    assert best_instruction_set(frozenset(REQUIRED_FLAGS["avx512"] | REQUIRED_FLAGS["avx2"])) == "avx512"
    assert best_instruction_set(frozenset(REQUIRED_FLAGS["avx512"] - {"avx512_bf16"} | REQUIRED_FLAGS["avx2"])) == "avx2"
    assert best_instruction_set(frozenset({"sse2"})) is None
    assert set(REQUIRED_FLAGS) == set(INSTRUCTION_SETS)


def test_what_linux_tells_of_the_first_processor(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("model name\t: Fast\nflags\t\t: fma avx2\npower management:\n\nmodel name\t: Slow\nflags\t\t: f16c\n\n")
    first = first_processor(str(cpuinfo))
    assert first["model name"] == "Fast"
    assert processor_flags(first) == {"fma", "avx2"}


def test_a_machine_without_cpuinfo_has_no_flags() -> None:
    assert processor_flags(first_processor("/no/such/file")) == frozenset()


def test_no_compiler_is_said_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BuildFailed, match=r"no g\+\+"):
        build()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that int8 kernels can run too."""
    folder = tmp_path_factory.mktemp("model")
    random_model("llama", hidden_size=192, intermediate_size=192).save_pretrained(folder)
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(folder / "tokenizer.json"))
    return folder


@needs_kernels
@pytest.mark.parametrize(
    ("settings", "kind", "dtype"),
    [
        ({"dtype": "auto"}, CpuModel, "bfloat16"),
        ({"dtype": "auto", "block_size": 32}, Decoder, "float32"),
        ({"dtype": "float32"}, Decoder, "float32"),
        ({"dtype": "bfloat16"}, CpuModel, "bfloat16"),
        ({"dtype": "bfloat16", "block_size": 32}, Decoder, "bfloat16"),
        ({"quantization": "int8"}, CpuModel, "bfloat16"),
        ({"kv_cache_dtype": "int8"}, CpuModel, "bfloat16"),
        ({"dtype": "float32", "kv_cache_dtype": "int8"}, Decoder, "float32"),
        ({"kv_cache_dtype": "int8", "block_size": 32}, Decoder, "float32"),
        ({"kv_cache_dtype": "int4"}, Decoder, "float32"),
        ({"dtype": "bfloat16", "kv_cache_dtype": "fp8"}, Decoder, "bfloat16"),
    ],
    ids=str,
)
def test_settings_decide_what_runs_a_model(folder: Path, settings: dict[str, Any], kind: type, dtype: str) -> None:
    runner = load_runner(folder, device="cpu", **settings)
    assert type(runner._model) is kind
    assert runner.description.dtype == dtype


@needs_kernels
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_kernels_choose_tokens_of_either_model_on_all_threads(folder: Path, dtype: str) -> None:
    """Though torch keeps one thread beside the kernels."""
    before = torch.get_num_threads()
    runner = load_runner(folder, device="cpu", dtype=dtype, threads=2)
    torch.set_num_threads(before)
    kernels = runner._sampler._kernels
    assert kernels is not None
    assert kernels._threads == 2


@needs_kernels
def test_the_next_model_of_a_process_has_as_many_threads_as_the_one_before(folder: Path) -> None:
    """Unless the process, whose torch's threads are, has set others in between."""
    before = torch.get_num_threads()
    found = []
    for process in (3, None, 2, None):
        if process is not None:
            torch.set_num_threads(process)
        runner = load_runner(folder, device="cpu", dtype="bfloat16")
        assert torch.get_num_threads() == 1, "the kernels have their own"
        kernels, model = runner._sampler._kernels, runner._model
        assert kernels is not None
        assert isinstance(model, CpuModel)
        found.append((kernels._threads, model._record.threads))
    torch.set_num_threads(before)
    assert found == [(3, 3), (3, 3), (2, 2), (2, 2)]


def test_without_kernels_torch_chooses_tokens(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "available", lambda: "there are none")
    assert load_runner(folder, device="cpu", dtype="float32")._sampler._kernels is None


@needs_kernels
@pytest.mark.parametrize(("block_size", "dtype", "reason"), [(16, "bfloat16", "kernels run it"), (32, "float32", "blocks of 16")])
def test_the_log_says_once_which_type_auto_is_and_why(folder: Path, block_size: int, dtype: str, reason: str) -> None:
    with structlog.testing.capture_logs() as logs:
        load_runner(folder, device="cpu", block_size=block_size)
    assert [(line["event"], line["dtype"]) for line in logs] == [("dtype chosen", dtype)]
    assert reason in logs[0]["reason"]


def test_int8_in_float32_is_an_operators_mistake(folder: Path) -> None:
    with pytest.raises(ModelError, match="On cpu weights can be quantised to int8 or int4, beside the dtype bfloat16"):
        load_runner(folder, device="cpu", dtype="float32", quantization="int8")


@needs_kernels
def test_a_step_before_allocate_is_refused() -> None:
    config = small_config()
    model = CpuModel(config, random_tensors(config), max_model_len=64)
    with pytest.raises(RuntimeError, match="allocate"):
        model.forward(make_batch([([1], 1, [0])]))


@needs_kernels
def test_unknown_quantisation_is_refused() -> None:
    config = small_config()
    with pytest.raises(ValueError, match="no kernels for quantization fp4"):
        cpu_model(config, random_tensors(config), quantization="fp4")


def test_an_arena_hands_out_aligned_zeros_until_it_is_used_up() -> None:
    arena = HugeArena(192)
    first, second = arena.take((3,), torch.uint8), arena.take((2, 8), torch.float32)
    assert second.shape == (2, 8)
    assert not first.any()
    assert not second.any()
    assert (second.data_ptr() - first.data_ptr()) == 64
    with pytest.raises(MemoryError):
        arena.take((65,), torch.uint8)
