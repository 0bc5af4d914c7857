"""Captures computations in CUDA graphs, and leaves stream and memory in order where that fails.

Must not know: what is computed, when it is run again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

from tokenmill_executor.model.device import first_line, is_lost, is_out_of_memory
from tokenmill_executor.model.graphs import Capture, CaptureFailed, Replay
from tokenmill_executor.runner import DeviceLost

_WARM_UPS = 2
# Torch's allocator of pinned memory goes on asking a capture that never ended whether a stream is in it, and cannot be told.
_broken: list[torch.cuda.CUDAGraph] = []


def cuda_capture(device: torch.device) -> Capture:
    """Graphs share one pool of memory: they are replayed one after another, and leave nothing there that is read after the next."""
    pool = torch.cuda.graph_pool_handle()
    stream = _side_stream(device)

    def capture(compute: Callable[[], None]) -> Replay:
        outside = torch.cuda.current_stream(device)
        # Not captured at first: kernels are compiled and libraries make their workspaces, which a capture may not see. An error
        # here is one of the computation, which no other way of running it would mend.
        stream.wait_stream(outside)
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                compute()
        outside.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                compute()
        except Exception as error:
            # Torch goes back to this stream only from a capture that began and ended well.
            torch.cuda.set_stream(outside)
            if _end_allocation(device, pool):
                _broken.append(graph)
            raise _failure(error, device) from error
        return graph.replay

    return capture


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all captures: on each cuBLAS makes itself a workspace, which was there when memory was measured for the cache."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _end_allocation(device: torch.device, pool: tuple[int, int]) -> bool:
    """Has torch's allocator no longer count on the capture, which it does unless that has ended well. Says whether it did.

    Else it would put off freeing whatever several streams use.
    """
    try:
        torch._C._cuda_endAllocateToPool(device.index, pool)
    except RuntimeError:  # it had ended
        return False
    torch._C._cuda_releasePool(device.index, pool)
    return True


def _failure(error: Exception, device: torch.device) -> Exception:
    """What to raise for it. The end of a broken capture fails too, and tells less than what broke it."""
    cause = error.__context__ or error
    told = first_line(cause)
    if is_lost(device):
        return DeviceLost(f"{device}, in a capture: {told}")
    if is_out_of_memory(cause) or is_out_of_memory(error):
        return MemoryError(f"{device} has no room for CUDA graphs: {told}")
    return CaptureFailed(told)
