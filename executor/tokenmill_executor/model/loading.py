"""From a checkpoint and settings to a runner."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import structlog
import torch

from tokenmill_executor.attention.quantization import KV_CACHE_DTYPES
from tokenmill_executor.cpu.choice import CpuChoice, choose_kernels, why_not
from tokenmill_executor.cpu.decodes import CpuDecodes
from tokenmill_executor.cpu.model import CpuModel
from tokenmill_executor.model.config import ModelConfig, ModelError, with_windows
from tokenmill_executor.model.cuda import cuda_decodes, cuda_draws, cuda_model
from tokenmill_executor.model.decoder import Decoder
from tokenmill_executor.model.linear import make_linear
from tokenmill_executor.model.memory import cpu_cache_bytes, cuda_cache_bytes, largest_batch
from tokenmill_executor.model.port import DecodeModel, Decodes, Model
from tokenmill_executor.model.quantized_linear import QUANTIZED_LINEARS
from tokenmill_executor.model.room import telling_whether_weights_fit
from tokenmill_executor.model.runner import TorchRunner
from tokenmill_executor.model.threads import leave_one_thread, use_threads
from tokenmill_executor.model.tokenizer_files import tokenizer_files
from tokenmill_executor.model.weights import Checkpoint
from tokenmill_executor.runner import RunnerDescription
from tokenmill_executor.sampling import MakeDraws, SamplingKernels, TorchDraws, available_kernels

log = structlog.get_logger(__name__)

# Ada and Hopper: the first with float8_e4m3.
_FP8_CAPABILITY = (8, 9)
CPU_QUANTIZATIONS, CUDA_QUANTIZATIONS = ("int8", "int4"), tuple(QUANTIZED_LINEARS)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """See `tokenmill_executor.model.load_runner`."""

    dtype: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    threads: int | None = None
    block_size: int = 16
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    attention_backend: str = "auto"
    sliding_window: int | None = None
    attention_sinks: int = 0
    enforce_eager: bool = False


def make_runner(checkpoint: Checkpoint, settings: LoadSettings) -> TorchRunner:
    """Raises ModelError. A CUDA device becomes the current one of this thread, which is to run the steps: Triton launches there."""
    device = _device(settings.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    max_model_len = _max_model_len(settings.max_model_len, checkpoint.config)
    windowed = with_windows(checkpoint.config, settings.sliding_window, settings.attention_sinks, max_model_len)
    checkpoint = replace(checkpoint, config=windowed)
    dtype = _dtype(settings, device, checkpoint.config, max_model_len)
    _check_cache(settings.kv_cache_dtype, device)
    if settings.attention_backend != "auto" and device.type != "cuda":
        raise ModelError(f"The attention backend {settings.attention_backend} is a choice for CUDA; on a CPU leave it auto.")
    threads = use_threads(settings.threads)
    sampling_kernels = available_kernels(threads) if device.type == "cpu" else None
    model = _model(checkpoint, dtype, device, max_model_len, settings)
    description = RunnerDescription(
        model=checkpoint.name,
        vocab_size=checkpoint.config.vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=checkpoint.config.eos_token_ids,
        device=f"{device} {torch.cuda.get_device_name(device)}" if device.type == "cuda" else str(device),
        dtype=str(dtype).removeprefix("torch."),
        block_groups=model.block_groups,
    )
    make_draws = cuda_draws(settings.attention_backend) if device.type == "cuda" else TorchDraws
    measure = partial(_cache_bytes, model, device, max_model_len, settings, make_draws)
    decodes, files = _decodes(model, device, sampling_kernels, make_draws), tokenizer_files(checkpoint.source)
    return TorchRunner(model, description, files, device, measure, sampling_kernels, decodes, make_draws)


def _model(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, max_model_len: int, settings: LoadSettings) -> Model:
    """float32 stays on torch, whose tokens are those of transformers; bfloat16 on a CPU runs on the C++ kernels where they can."""
    if device.type == "cpu" and dtype == torch.bfloat16:
        kernels = choose_kernels(checkpoint.config, checkpoint.tensors, _cpu_choice(settings, max_model_len))
        if kernels is not None:
            leave_one_thread()
            return kernels
    if device.type == "cuda":
        with telling_whether_weights_fit(checkpoint, dtype, settings.quantization, device):
            return cuda_model(
                checkpoint.config,
                checkpoint.tensors,
                dtype,
                device,
                max_model_len,
                settings.max_num_seqs,
                settings.kv_cache_dtype,
                settings.attention_backend,
                QUANTIZED_LINEARS.get(settings.quantization or "", make_linear),
                settings.enforce_eager,
            )
    kv_cache_dtype = settings.kv_cache_dtype
    return Decoder(checkpoint.config, checkpoint.tensors, dtype, device, max_model_len, kv_cache_dtype=kv_cache_dtype)


def _decodes(model: Model, device: torch.device, kernels: SamplingKernels | None, make_draws: MakeDraws) -> Decodes | None:
    """None where the host has to look at each step."""
    if isinstance(model, CpuModel) and kernels is not None:
        return CpuDecodes(model, kernels)
    return cuda_decodes(model, make_draws, device) if device.type == "cuda" and isinstance(model, DecodeModel) else None


def _cache_bytes(model: Model, device: torch.device, max_model_len: int, settings: LoadSettings, make_draws: MakeDraws) -> int:
    if settings.kv_cache_memory_bytes is not None:
        return settings.kv_cache_memory_bytes
    if device.type == "cpu":
        return cpu_cache_bytes()
    groups = len(model.block_groups)
    batch = largest_batch(settings.max_num_batched_tokens, settings.max_num_seqs, max_model_len, groups)
    return cuda_cache_bytes(model, device, settings.gpu_memory_utilization, batch, make_draws)


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" or name.startswith("cuda:"):
        if not torch.cuda.is_available():
            raise ModelError("There is no CUDA device that torch can use; choose the device cpu.")
        index = int(name.removeprefix("cuda").removeprefix(":") or torch.cuda.current_device())
        return torch.device("cuda", index)
    if name != "cpu":
        raise ModelError(f"The device {name!r} is not supported; choose auto, cpu or cuda.")
    return torch.device("cpu")


def _check_cache(kv_cache_dtype: str, device: torch.device) -> None:
    """Raises ModelError for a cache that there is not on the device."""
    if kv_cache_dtype not in KV_CACHE_DTYPES:
        raise ModelError(f"The KV cache type {kv_cache_dtype!r} is not supported; choose one of {', '.join(KV_CACHE_DTYPES)}.")
    if kv_cache_dtype == "fp8" and device.type == "cuda" and torch.cuda.get_device_capability(device) < _FP8_CAPABILITY:
        raise ModelError("An fp8 KV cache needs a GPU of compute capability 8.9 or higher; choose int8, of the same size.")


def _cpu_choice(settings: LoadSettings, max_model_len: int) -> CpuChoice:
    return CpuChoice(max_model_len, settings.block_size, settings.quantization, settings.kv_cache_dtype)


def _dtype(settings: LoadSettings, device: torch.device, config: ModelConfig, max_model_len: int) -> torch.dtype:
    name, quantizes = settings.dtype, settings.quantization is not None
    offered = CUDA_QUANTIZATIONS if device.type == "cuda" else CPU_QUANTIZATIONS
    if quantizes and (settings.quantization not in offered or name == "float32"):
        raise ModelError(f"On {device.type} weights can be quantised to {' or '.join(offered)}, beside the dtype bfloat16.")
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" or quantizes else _cpu_dtype(config, _cpu_choice(settings, max_model_len))
    if name not in DTYPES:
        raise ModelError(f"The type {name!r} is not supported; choose auto, float32 or bfloat16.")
    return DTYPES[name]


def _cpu_dtype(config: ModelConfig, choice: CpuChoice) -> torch.dtype:
    """bfloat16 is several times faster on the kernels and no faster without them."""
    reason = why_not(config, choice)
    if reason is None:
        log.info("dtype chosen", dtype="bfloat16", reason="the C++ kernels run it; for the tokens of transformers choose float32")
        return torch.bfloat16
    log.warning("dtype chosen", dtype="float32", reason=f"the C++ kernels, several times faster, cannot be used: {reason}")
    return torch.float32


def _max_model_len(asked: int | None, config: ModelConfig) -> int:
    if asked is not None and asked > config.max_model_len:
        raise ModelError(f"max_model_len is {asked}, but the model is made for at most {config.max_model_len} tokens.")
    return asked or config.max_model_len
