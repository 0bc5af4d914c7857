"""What a capture that fails leaves behind, with torch's own `torch.cuda.graph` over a fake of the driver and of torch's allocator.

The fake does what `CUDAGraph.cpp` does: a broken capture ends in an error, and then nobody goes back to the stream from before, nor
tells the allocator that the capture is over.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from tokenmill_executor.model import capture as capture_module
from tokenmill_executor.model.capture import cuda_capture
from tokenmill_executor.model.graphs import CaptureFailed
from tokenmill_executor.runner import DeviceLost

DEVICE = torch.device("cuda", 0)
NOT_PERMITTED = "CUDA error: operation not permitted when stream is capturing\nSearch for `cudaErrorStreamCaptureUnsupported' in"
INVALIDATED = "CUDA error: operation failed due to a previous error during capture\nSearch for"
ILLEGAL = "CUDA error: an illegal memory access was encountered\nSearch for"


class FakeCuda:
    """`broken` is what the capture in hand ended in, `lost` the error that every call meets from then on."""

    def __init__(self) -> None:
        self.default, self.current = FakeStream("default"), FakeStream("")
        self.current = self.default
        self.recording: list[object] = []
        self.pool_users = 0
        self.capturing = False
        self.broken = False
        self.instantiation: Exception | None = None
        self.lost: str | None = None
        self.graphs: list[weakref.ref[FakeGraph]] = []

    def wait_in_capture(self) -> None:
        """An operation that waits for the device, of the computation."""
        if self.capturing:
            self.broken = True
            raise RuntimeError(NOT_PERMITTED)

    def synchronize(self, _: object = None) -> None:
        if self.lost:
            raise RuntimeError(self.lost)

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def set_stream(self, stream: FakeStream) -> None:
        self.current = stream

    def end_allocate(self, device: int, pool: object) -> None:
        assert device == 0
        if pool not in self.recording:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.recording.remove(pool)

    def release(self, device: int, pool: object) -> None:
        self.pool_users -= 1


class FakeStream:
    def __init__(self, device: object) -> None:
        self.device = device

    def wait_stream(self, other: FakeStream) -> None:
        assert isinstance(other, FakeStream)


class FakeGraph:
    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self._ended = False
        self.replays = 0
        cuda.graphs.append(weakref.ref(self))

    def capture_begin(self, pool: object, **_: object) -> None:
        assert self._cuda.current is not self._cuda.default
        assert pool not in self._cuda.recording
        self._pool = pool
        self._cuda.recording.append(pool)
        self._cuda.pool_users += 1
        self._cuda.capturing, self._cuda.broken = True, False

    def capture_end(self) -> None:
        self._cuda.capturing = False
        self._cuda.synchronize()
        if self._cuda.broken:
            raise RuntimeError(INVALIDATED)
        self._cuda.end_allocate(0, self._pool)
        self._ended = True
        if self._cuda.instantiation is not None:
            raise self._cuda.instantiation

    def replay(self) -> None:
        assert self._ended
        self.replays += 1

    def __del__(self) -> None:
        if self._ended:
            self._cuda.release(0, self._pool)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(capture_module, "_side_stream", cache(capture_module._side_stream.__wrapped__))
    monkeypatch.setattr(capture_module, "_broken", [])
    faked: dict[str, Any] = {
        "graph_pool_handle": lambda: (0, 1),
        "Stream": FakeStream,
        "CUDAGraph": lambda: FakeGraph(fake),
        "current_stream": lambda _: fake.current,
        "stream": fake.stream,
        "set_stream": fake.set_stream,
        "synchronize": fake.synchronize,
        "empty_cache": lambda: None,
    }
    for name, value in faked.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", fake.end_allocate, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", fake.release, raising=False)
    return fake


def test_a_computation_is_run_twice_before_it_is_captured_on_another_stream(cuda: FakeCuda) -> None:
    seen: list[tuple[bool, bool]] = []
    replay = cuda_capture(DEVICE)(lambda: seen.append((cuda.capturing, cuda.current is cuda.default)))
    assert seen == [(False, False), (False, False), (True, False)]
    assert (cuda.current, cuda.recording) == (cuda.default, [])
    replay()
    assert len(seen) == 3


def test_all_captures_are_on_one_stream(cuda: FakeCuda) -> None:
    """Also those of another cache, which was sized with what libraries have on that stream."""
    streams: list[object] = []
    for _ in range(2):
        cuda_capture(DEVICE)(lambda: streams.append(cuda.current))
    assert len(streams) == 6
    assert len(set(streams)) == 1


def test_a_failed_capture_leaves_stream_and_pool_in_order(cuda: FakeCuda) -> None:
    capture = cuda_capture(DEVICE)
    kept = capture(lambda: None)
    with pytest.raises(CaptureFailed) as caught:
        capture(cuda.wait_in_capture)
    # What broke it, not what its end made of that, and without torch's advice.
    assert str(caught.value) == NOT_PERMITTED.splitlines()[0]
    assert (cuda.current, cuda.recording, cuda.pool_users) == (cuda.default, [], 1)
    kept()
    del caught
    gc.collect()
    # Whoever still asks it whether it captures finds it.
    assert cuda.graphs[-1]() is not None


def test_an_error_that_broke_no_capture_is_told_alike(cuda: FakeCuda) -> None:
    def compute() -> None:
        if cuda.capturing:
            raise ValueError("no way to launch")

    with pytest.raises(CaptureFailed, match="no way to launch"):
        cuda_capture(DEVICE)(compute)
    gc.collect()
    assert (cuda.current, cuda.recording, cuda.pool_users) == (cuda.default, [], 0)


def test_a_capture_that_finds_no_memory_says_so(cuda: FakeCuda) -> None:
    cuda.instantiation = RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be")
    with pytest.raises(MemoryError, match=r"cuda:0 has no room for CUDA graphs: CUDA error: out of memory$"):
        cuda_capture(DEVICE)(lambda: None)
    assert (cuda.current, cuda.recording) == (cuda.default, [])


def test_a_device_lost_in_a_capture_is_no_failed_capture(cuda: FakeCuda) -> None:
    def compute() -> None:
        if cuda.capturing:
            cuda.lost = ILLEGAL

    with pytest.raises(DeviceLost, match=r"cuda:0, in a capture: CUDA error: an illegal memory access was encountered$"):
        cuda_capture(DEVICE)(compute)


def test_what_cannot_even_be_computed_is_an_error_of_its_own(cuda: FakeCuda) -> None:
    def compute() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        cuda_capture(DEVICE)(compute)
