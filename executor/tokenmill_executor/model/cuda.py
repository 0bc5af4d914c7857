"""A decoder for CUDA: Triton kernels, decode steps from CUDA graphs where the attention allows, several of them without the host.

Must not know: what is captured, sequences, batches. Without Triton torch's own operations run.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from tokenmill_executor.attention.backend import CacheShape, DecodeBackend
from tokenmill_executor.attention.choice import choose_attention
from tokenmill_executor.attention.rotation import rotated, rotated_decodes
from tokenmill_executor.model.capture import cuda_capture
from tokenmill_executor.model.config import ModelConfig
from tokenmill_executor.model.cuda_decodes import CudaDecodes
from tokenmill_executor.model.decoder import Decoder
from tokenmill_executor.model.device import CudaClock, CudaDownload
from tokenmill_executor.model.graphs import Capture, GraphedDecoder, run_eagerly
from tokenmill_executor.model.linear import LinearMaker, make_linear
from tokenmill_executor.model.ops import Ops
from tokenmill_executor.model.port import DecodeModel
from tokenmill_executor.sampling import MakeDraws, TorchDraws


def cuda_model(
    config: ModelConfig,
    tensors: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    max_num_seqs: int,
    kv_cache_dtype: str = "auto",
    attention_backend: str = "auto",
    linear: LinearMaker = make_linear,
    enforce_eager: bool = False,
) -> DecodeModel:
    """See `choose_attention` for `attention_backend`; with "reference" all of it is torch. `linear` is the decoder's.

    With `enforce_eager` nothing is captured, but kernels are compiled at the same time and steps are the same.
    """
    shape = CacheShape.of(config, dtype, device, kv_cache_dtype)
    attention, ops = choose_attention(attention_backend, shape), None if attention_backend == "reference" else _ops()
    if isinstance(attention, DecodeBackend):
        decodes = rotated_decodes(attention, shape)
        decoder = Decoder(config, tensors, dtype, device, max_model_len, lambda _: decodes, ops, kv_cache_dtype, linear)
        return GraphedDecoder(decoder, decodes, lambda: _capture(device, enforce_eager), max_num_seqs, max_model_len)
    turned = rotated(attention, shape)
    return Decoder(config, tensors, dtype, device, max_model_len, lambda _: turned, ops, kv_cache_dtype, linear)


def cuda_draws(attention_backend: str) -> MakeDraws:
    """Such as wait for nothing on the device. Torch's sort all tokens of a truncated row, which takes long with many such rows."""
    if attention_backend != "reference":
        try:
            from tokenmill_executor.sampling.triton_draws import TritonDraws
        except ImportError:
            pass
        else:
            return TritonDraws
    return partial(TorchDraws, widths=())


def cuda_decodes(model: DecodeModel, make_draws: MakeDraws, device: torch.device) -> CudaDecodes:
    return CudaDecodes(model, make_draws, device, CudaClock(), CudaDownload)


def _ops() -> Ops | None:
    """None without Triton, of which `choose_attention` has told."""
    try:
        from tokenmill_executor.model.triton_ops import TritonOps
    except ImportError:
        return None
    return TritonOps()


def _capture(device: torch.device, enforce_eager: bool) -> Capture:
    return run_eagerly if enforce_eager else cuda_capture(device)
