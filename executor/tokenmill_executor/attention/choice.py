"""Which attention runs on a CUDA device: the one asked for where it can serve the cache, else the next best and a line in the log.

Must not know: weights, settings beyond the one that decides this. Triton and FlashInfer are imported only if they may serve.
"""

from __future__ import annotations

import structlog

from tokenmill_executor.attention.backend import AttentionBackend, CacheShape
from tokenmill_executor.attention.reference import ReferenceAttention
from tokenmill_executor.model.config import ModelError

log = structlog.get_logger(__name__)

ATTENTION_BACKENDS = ("auto", "reference", "triton", "flashinfer")


def choose_attention(name: str, shape: CacheShape, num_processors: int | None = None) -> AttentionBackend:
    """`num_processors` is for Triton's. Raises ModelError for a name that there is not."""
    if name not in ATTENTION_BACKENDS:
        *others, last = ATTENTION_BACKENDS
        raise ModelError(f"The attention backend {name!r} is not supported; choose {', '.join(others)} or {last}.")
    if name == "reference":
        return ReferenceAttention(shape)
    chosen = _flashinfer(shape) if name == "flashinfer" else None
    return chosen or _triton(shape, num_processors) or ReferenceAttention(shape)


def _flashinfer(shape: CacheShape) -> AttentionBackend | None:
    try:
        from tokenmill_executor.attention.flashinfer_backend import FlashInferAttention, why_not
    except ImportError as error:
        log.warning("FlashInfer unused", reason=str(error), instead="triton")
        return None
    reason = why_not(shape)
    if reason is None:
        return FlashInferAttention(shape)
    log.warning("FlashInfer unused", reason=reason, instead="triton")
    return None


def _triton(shape: CacheShape, num_processors: int | None) -> AttentionBackend | None:
    try:
        from tokenmill_executor.attention.triton_backend import TritonAttention
    except ImportError as error:
        log.warning("Triton unused", reason=str(error), instead="torch's own operations, several times slower")
        return None
    return TritonAttention(shape, num_processors)
