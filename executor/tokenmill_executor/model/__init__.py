"""Real models: checkpoints, tokenizer files, the decoder and its runner. Importing this does not import torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenmill_executor.model.runner import TorchRunner


def load_runner(
    path: str | Path,
    *,
    dtype: str = "auto",
    device: str = "auto",
    max_model_len: int | None = None,
    max_num_seqs: int = 256,
    max_num_batched_tokens: int = 8192,
    kv_cache_memory_bytes: int | None = None,
    gpu_memory_utilization: float = 0.9,
    threads: int | None = None,
    block_size: int = 16,
    quantization: str | None = None,
    kv_cache_dtype: str = "auto",
    attention_backend: str = "auto",
    sliding_window: int | None = None,
    attention_sinks: int = 0,
    enforce_eager: bool = False,
) -> TorchRunner:
    """A Hugging Face directory or a GGUF file, loaded. Call it on the thread that will run the steps.

    - dtype: "float32", whose tokens are those of transformers, "bfloat16", or "auto": bfloat16 on CUDA and where the C++ kernels
      can run it on a CPU, else float32.
    - device: "cpu", "cuda", "cuda:N", or "auto": CUDA if there is a device.
    - max_model_len: at most the model's own, which is the default.
    - max_num_seqs, max_num_batched_tokens: the largest step, run on CUDA to see what memory it needs.
    - threads: of a CPU forward pass; None: as many as torch has, or had before an earlier model on the C++ kernels.
    - block_size: that of the cache to come; the C++ kernels for bfloat16 on a CPU have only blocks of 16.
    - quantization: "int8" or "int4", on a CPU, of the weights.
    - kv_cache_dtype: "auto", the model's type, "bfloat16", "int8", "int4" or "fp8".
    - attention_backend: on CUDA; "auto" is "triton", "reference" is plain torch, "flashinfer" needs the package of that name.
    - sliding_window: most positions that any layer sees, its own windows if they are shorter; attention_sinks: first positions that
      layers with a window see as well.
    - enforce_eager: on CUDA; decode steps are launched operation by operation, not from graphs.

    Raises ModelError (a ValueError), with a sentence for the operator.
    """
    _wait_briefly()
    from tokenmill_executor.model.host_memory import trim
    from tokenmill_executor.model.loading import LoadSettings, make_runner
    from tokenmill_executor.model.weights import load_checkpoint

    settings = LoadSettings(
        dtype=dtype,
        device=device,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        kv_cache_memory_bytes=kv_cache_memory_bytes,
        gpu_memory_utilization=gpu_memory_utilization,
        threads=threads,
        block_size=block_size,
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        attention_backend=attention_backend,
        sliding_window=sliding_window,
        attention_sinks=attention_sinks,
        enforce_eager=enforce_eager,
    )
    runner = make_runner(load_checkpoint(path), settings)
    trim()
    return runner


def _wait_briefly() -> None:
    """Has OpenMP's threads wait for each other in sleep after about 0.2 ms of spinning; heeded if torch is not yet loaded.

    Left to spin for long, they take the cores from each other as soon as other processes want some: on two busy cores a step took
    six times as long. An operator's own OMP_WAIT_POLICY or GOMP_SPINCOUNT stands.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
