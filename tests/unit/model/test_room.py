"""What an operator is told of weights that a GPU has no room for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models
from tokenmill_executor.loading import load_runner
from tokenmill_executor.model import loading, room
from tokenmill_executor.model.weights import load_checkpoint
from tokenmill_executor.settings import parse_settings
from tokenmill_service.flags import SettingsError

from tests.fakes.models import random_model

GPU = torch.device("cuda", 0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    random_model("llama").save_pretrained(tmp_path)
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Of 8 GiB, which has no room for 1,000 GiB."""

    def cuda_model(*given: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nSee documentation")

    monkeypatch.setattr(loading, "_device", lambda name: GPU)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(loading, "cuda_model", cuda_model)
    monkeypatch.setattr(room, "device_bytes", lambda device: 8 << 30)
    monkeypatch.setattr(room, "weight_bytes", lambda *given: 1_000 << 30)
    return monkeypatch


@pytest.mark.parametrize(
    ("flags", "kind", "choice"),
    [
        ((), "bfloat16", "choose the quantization fp8 or int8, a smaller model or another device"),
        (("--quantization", "int8"), "int8", "choose a smaller model or another device"),
        (("--dtype", "float32"), "float32", "choose the dtype bfloat16, a smaller model or another device"),
    ],
)
def test_weights_that_do_not_fit_are_a_matter_of_settings(
    folder: Path, gpu: pytest.MonkeyPatch, flags: tuple[str, ...], kind: str, choice: str
) -> None:
    with pytest.raises(SettingsError) as told:
        load_runner(parse_settings(["--model", str(folder), *flags], {}))
    assert str(told.value) == (
        f"--model {folder} cannot be loaded: The weights need about 1000.0 GiB in {kind}, and cuda:0 has 8.0 GiB in all; "
        f"{choice}: CUDA out of memory. Tried to allocate 2 GiB."
    )


def test_another_error_is_a_fault(folder: Path, gpu: pytest.MonkeyPatch) -> None:
    def cuda_model(*given: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    gpu.setattr(loading, "cuda_model", cuda_model)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        load_runner(parse_settings(["--model", str(folder)], {}))


def test_what_weights_need(folder: Path) -> None:
    oracle, checkpoint = random_model("llama"), load_checkpoint(folder)
    sizes = {name: parameter.numel() for name, parameter in oracle.named_parameters()}
    projections = sum(size for name, size in sizes.items() if "_proj" in name)
    assert room.weight_bytes(checkpoint, torch.float32, None) == 4 * sum(sizes.values())
    assert room.weight_bytes(checkpoint, torch.bfloat16, "int8") == 2 * sum(sizes.values()) - projections
