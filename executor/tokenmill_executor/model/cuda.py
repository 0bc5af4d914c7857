"""A decoder for CUDA: Triton kernels, decode steps from CUDA graphs.

Must not know: what is captured, sequences, batches. Without Triton the plain decoder runs, and a line in the log says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import structlog
import torch

from tokenmill_executor.attention.backend import CacheShape
from tokenmill_executor.model.config import ModelConfig
from tokenmill_executor.model.decoder import Decoder
from tokenmill_executor.model.graphs import Capture, GraphedDecoder, Replay
from tokenmill_executor.model.port import Model

log = structlog.get_logger(__name__)

_WARM_UPS = 2


def cuda_model(
    config: ModelConfig,
    tensors: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    max_num_seqs: int,
) -> Model:
    try:
        from tokenmill_executor.attention.triton_backend import TritonAttention
        from tokenmill_executor.model.triton_ops import TritonOps
    except ImportError as error:
        log.warning("triton_unused", reason=str(error), instead="torch's own operations, several times slower")
        return Decoder(config, tensors, dtype, device, max_model_len)
    attention = TritonAttention(CacheShape.of(config, dtype, device))
    decoder = Decoder(config, tensors, dtype, device, max_model_len, lambda _: attention, TritonOps())
    return GraphedDecoder(decoder, attention, partial(cuda_capture, device), max_num_seqs, max_model_len)


def cuda_capture(device: torch.device) -> Capture:
    """Graphs share one pool of memory: they are replayed one after another, and their results are read before the next."""
    pool = torch.cuda.graph_pool_handle()
    # Its own, and one for all: on each stream that it is used on, cuBLAS makes itself a workspace.
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def capture(compute: Callable[[], None]) -> Replay:
        # Not captured at first: kernels are compiled and libraries make their workspaces, which a capture may not see.
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                compute()
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            compute()
        return graph.replay

    return capture
