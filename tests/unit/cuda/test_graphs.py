"""Decode steps from graphs against the plain decoder, on a fake device that captures and replays as CUDA does.

A replay computes again from the captured tensors and nothing else: what the host did between is not seen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import structlog
import torch
from tokenmill_executor.attention.backend import CacheShape
from tokenmill_executor.attention.rotation import rotated_decodes
from tokenmill_executor.attention.triton_backend import Tiling, TritonAttention
from tokenmill_executor.model.config import ModelConfig, config_from_hf
from tokenmill_executor.model.cuda import cuda_model
from tokenmill_executor.model.decoder import Decoder
from tokenmill_executor.model.graphs import CaptureFailed, GraphedDecoder, Replay, padded_sizes
from tokenmill_executor.model.triton_ops import TritonOps

from tests.fakes.batches import Blocks, Track
from tests.fakes.models import TINY_SIZES, random_model

CPU = torch.device("cpu")
NUM_BLOCKS, BLOCK_SIZE, MAX_MODEL_LEN = 32, 4, 64


class FakeDevice:
    """Counts; `log` has the number of a graph for each replay. No more than `most` can be captured, for `reason`."""

    def __init__(self) -> None:
        self.captured = 0
        self.log: list[int] = []
        self.most = 1000
        self.reason: Exception = CaptureFailed("operation not permitted when stream is capturing")

    def capture(self, compute: Callable[[], None]) -> Replay:
        if self.captured == self.most:
            raise self.reason
        number, self.captured = self.captured, self.captured + 1
        compute()

        def replay() -> None:
            self.log.append(number)
            compute()

        return replay


class Pair:
    """The plain decoder on the reference, and the graphed one on Triton, with the same weights."""

    def __init__(
        self,
        max_num_seqs: int = 6,
        family: str = "qwen3",
        kv_cache_dtype: str = "auto",
        num_processors: int = 1,
        chunk: Tiling | None = None,
        device: FakeDevice | None = None,
        **changes: Any,
    ) -> None:
        model = random_model(family, **TINY_SIZES, **changes)
        self.config: ModelConfig = config_from_hf(model.config.to_dict())
        tensors = model.state_dict()
        # A code beside the reference's moves a logit by far less than a step of the codes.
        self.tolerance = 1e-4 if kv_cache_dtype == "auto" else 2e-2
        given = (self.config, tensors, torch.float32, CPU, MAX_MODEL_LEN)
        self.plain = Decoder(*given, kv_cache_dtype=kv_cache_dtype)
        shape = CacheShape.of(self.config, torch.float32, CPU, kv_cache_dtype)
        self.triton = TritonAttention(shape, num_processors, chunk=chunk)
        self.attention = rotated_decodes(self.triton, shape)
        decoder = Decoder(*given, lambda _: self.attention, TritonOps(), kv_cache_dtype)
        self.device = device or FakeDevice()
        self.graphed = GraphedDecoder(decoder, self.attention, lambda: self.device.capture, max_num_seqs, MAX_MODEL_LEN)
        self.allocate()

    def allocate(self) -> None:
        self.blocks = Blocks(NUM_BLOCKS, BLOCK_SIZE, groups=len(self.plain.block_groups))
        self.plain.allocate(NUM_BLOCKS, BLOCK_SIZE)
        self.graphed.allocate(NUM_BLOCKS, BLOCK_SIZE)

    def tracks(self, *lengths: int) -> list[Track]:
        return [self.blocks.track([3 + length + place for place in range(length)]) for length in lengths]

    @torch.inference_mode()
    def step(self, *advances: tuple[Track, int]) -> None:
        """Compares logits, and feeds the tokens back."""
        sampling = [track for track, count in advances if track.computed + count == len(track.tokens)]
        batch = self.blocks.batch(advances)
        expected, got = self.plain.forward(batch), self.graphed.forward(batch)
        torch.testing.assert_close(got, expected, rtol=self.tolerance, atol=self.tolerance)
        for track, token in zip(sampling, expected.argmax(-1).tolist(), strict=True):
            track.tokens.append(token)

    def check_caches(self) -> None:
        for mine, theirs in zip(self.graphed.storage(), self.plain.storage(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_sizes_double_then_go_in_half_steps_and_end_with_the_most() -> None:
    assert padded_sizes(1) == [1]
    assert padded_sizes(6) == [1, 2, 4, 6]
    assert padded_sizes(200) == [1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 200]
    assert padded_sizes(10_000)[-1] == 512


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_sequences_that_come_and_go_are_decoded_as_without_graphs(family: str) -> None:
    """Batches grow and shrink, so rows of padding hold what was there before; they leave no trace in the cache."""
    pair = Pair(family=family)
    first, second, third, late = pair.tracks(9, 3, 5, 7)
    pair.step((first, 9), (second, 3), (third, 5))
    assert pair.device.log == []
    pair.step((first, 1), (second, 1), (third, 1))
    pair.step((third, 1), (first, 1))
    pair.step((second, 1), (late, 7), (first, 1))
    pair.step((late, 1), (second, 1), (first, 1), (third, 1))
    pair.step((third, 1))
    # Of the graphs for 6, 4, 2 and 1 sequences, in the order of their capture; the mixed step has none.
    assert pair.device.log == [1, 2, 1, 3]
    pair.check_caches()


def test_groups_of_layers_have_slots_and_tables_of_their_own_in_a_graph() -> None:
    """Of Gemma 3, whose kinds of layers turn differently too."""
    pair = Pair(4, "gemma3_text", sliding_window=6, layer_types=["sliding_attention", "full_attention"])
    first, second, third = pair.tracks(9, 3, 14)
    pair.step((first, 9), (second, 3), (third, 14))
    for _ in range(3):
        pair.step((third, 1), (first, 1), (second, 1))
    assert pair.device.log == [0, 0, 0]
    pair.check_caches()


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "int4"])
def test_a_quantised_cache_is_written_and_read_in_graphs(kv_cache_dtype: str) -> None:
    """Padding, whose slot is nobody's, leaves no scale in any block."""
    pair = Pair(max_num_seqs=4, kv_cache_dtype=kv_cache_dtype)
    first, second, third = pair.tracks(9, 3, 5)
    pair.step((first, 9), (second, 3), (third, 5))
    for _ in range(3):
        pair.step((first, 1), (second, 1), (third, 1))
    assert len(pair.device.log) == 3
    for mine, theirs in zip(pair.graphed.storage()[1::2], pair.plain.storage()[1::2], strict=True):
        assert torch.equal(mine != 0, theirs != 0)


def test_chunks_are_tried_in_every_way_they_are_split_before_the_first_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel is compiled for; and nothing of that stays in the cache."""
    tried: list[int] = []
    run = TritonAttention._attend

    def attend(self: TritonAttention, layer: int, query: torch.Tensor, out: torch.Tensor, launch: Any) -> None:
        if launch.queries > 1:
            tried.append(launch.splits)
        run(self, layer, query, out, launch)

    monkeypatch.setattr(TritonAttention, "_attend", attend)
    pair = Pair(max_num_seqs=1, num_processors=16, chunk=Tiling(32, 4, 4, 2))
    assert sorted({pair.triton._chunk_splits(1, context) for context in range(2, MAX_MODEL_LEN + 1)}) == sorted(set(tried))
    assert max(tried) == 4
    assert not any(tensor.any() for tensor in pair.graphed.storage())


def test_a_step_that_is_no_plain_decode_goes_to_the_decoder() -> None:
    pair = Pair(max_num_seqs=2)
    tracks = pair.tracks(4, 5, 6)
    pair.step((tracks[0], 1), (tracks[1], 1))  # in mid-prompt: one token, but none sampled
    pair.step((tracks[0], 3), (tracks[1], 4), (tracks[2], 6))
    pair.step(*((track, 1) for track in tracks))  # more than the largest graph
    assert pair.device.log == []


def test_long_contexts_have_graphs_of_their_own_before_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenmill_executor.attention.triton_backend._POSITIONS_PER_SPLIT", 16)
    pair = Pair(max_num_seqs=4)
    # Of up to 64 positions: for 4 and for 2 sequences in four, two and one parts, for 1 in four and two.
    assert pair.device.captured == 8
    long, short = pair.tracks(31, 3)
    pair.step((long, 31), (short, 3))
    pair.step((long, 1), (short, 1))
    pair.step((short, 1), (long, 1))  # 33 positions: three parts of 16, so two splits still
    pair.step((short, 1))
    assert pair.device.log == [4, 4, 7]
    assert pair.device.captured == 8
    pair.check_caches()


@pytest.mark.parametrize(("max_model_len", "graphs"), [(8192, 18), (32_768, 33), (131_072, 52)])
def test_all_graphs_are_some_dozens(max_model_len: int, graphs: int) -> None:
    """Of Llama 3 8B on an H200, with the default of 256 sequences."""
    shape = CacheShape(32, 32, 8, 128, (None,) * 32, torch.bfloat16, CPU)
    attention = TritonAttention(shape, num_processors=132)
    counts = {size: attention.all_decode_splits(size, max_model_len) for size in padded_sizes(256)}
    assert sum(map(len, counts.values())) == graphs
    for size, splits in counts.items():
        assert splits == sorted({attention.decode_splits(size, context) for context in range(1, max_model_len + 1, 7)})


def test_a_graph_that_is_not_there_is_run_and_not_captured_in_mid_service() -> None:
    pair = Pair(max_num_seqs=2)
    first, second = pair.tracks(5, 6)
    pair.step((first, 5), (second, 6))
    del pair.graphed._replays[2, 1]
    pair.step((first, 1), (second, 1))
    pair.step((first, 1))
    assert (pair.device.captured, pair.device.log) == (2, [1])
    pair.check_caches()


def test_where_a_capture_fails_steps_run_without_from_there_on_and_one_line_says_so() -> None:
    """On a later cache, such as the one behind the measurement of memory, none is tried any more."""
    device = FakeDevice()
    device.most = 2
    with structlog.testing.capture_logs() as logs:
        pair = Pair(max_num_seqs=6, device=device)
    tracks = pair.tracks(5, 6, 7, 8, 9, 4)
    pair.step(*((track, len(track.tokens)) for track in tracks))
    pair.step(*((track, 1) for track in tracks))
    pair.step(*((track, 1) for track in tracks[:2]))
    pair.step((tracks[4], 1))
    assert device.log == [0]
    pair.check_caches()
    with structlog.testing.capture_logs() as more:
        pair.allocate()
    pair.step(*((track, 3) for track in pair.tracks(3, 3)))
    assert device.captured == 2
    warnings = [line for line in logs + more if line["log_level"] == "warning"]
    assert [(line["event"], line["reason"], line["captured"], line["of"]) for line in warnings] == [
        ("CUDA graphs unused", "operation not permitted when stream is capturing", 2, 4)
    ]


def test_enforced_eager_steps_are_those_of_the_decoder_and_compiled_before_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made as for CUDA; what captures is never asked, and the model still takes several steps without the host."""
    monkeypatch.setattr("tokenmill_executor.attention.triton_backend._count_processors", lambda _: 1)
    compiled: list[int] = []
    run = TritonAttention._attend

    def attend(self: TritonAttention, layer: int, query: torch.Tensor, out: torch.Tensor, launch: Any) -> None:
        compiled.append(len(launch.sequences))
        run(self, layer, query, out, launch)

    monkeypatch.setattr(TritonAttention, "_attend", attend)
    pair = Pair(max_num_seqs=2)
    tensors = random_model("qwen3", **TINY_SIZES).state_dict()
    compiled.clear()
    model = cuda_model(pair.config, tensors, torch.float32, CPU, MAX_MODEL_LEN, 2, enforce_eager=True)
    assert isinstance(model, GraphedDecoder)
    model.allocate(NUM_BLOCKS, BLOCK_SIZE)
    assert {1, 2} <= set(compiled)
    pair.graphed = model
    first, second = pair.tracks(5, 6)
    pair.step((first, 5), (second, 6))
    pair.step((first, 1), (second, 1))
    pair.step((second, 1))
    pair.check_caches()


def test_no_memory_for_graphs_is_no_reason_to_go_on_without() -> None:
    device = FakeDevice()
    device.most, device.reason = 1, MemoryError("cuda:0 has no room for CUDA graphs")
    with pytest.raises(MemoryError, match="no room"):
        Pair(device=device)


def test_the_log_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenmill_executor.model.graphs._TOLD_EVERY", 3)
    with structlog.testing.capture_logs() as logs:
        Pair(max_num_seqs=6)
    assert [(line["event"], line["done"], line["of"]) for line in logs] == [
        ("decode steps prepared", 3, 4),
        ("decode steps prepared", 4, 4),
    ]


def test_a_new_cache_gets_new_graphs_and_none_takes_them_away() -> None:
    pair = Pair(max_num_seqs=2)
    (track,) = pair.tracks(5)
    pair.step((track, 5))
    pair.step((track, 1))
    pair.allocate()
    assert pair.device.captured == 4
    (track,) = pair.tracks(5)
    pair.step((track, 5))
    pair.step((track, 1))
    assert pair.device.log == [1, 3]
    pair.graphed.allocate(0, BLOCK_SIZE)
    assert pair.device.captured == 4


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning", "ignore:overflow:RuntimeWarning")
def test_numbers_that_overflow_fail_their_sequence_alone() -> None:
    pair = Pair(max_num_seqs=2)
    with torch.no_grad():
        for decoder in (pair.plain, pair.graphed._decoder):
            decoder._embeddings[77] = torch.inf
    healthy, poisoned = pair.tracks(5, 4)
    pair.step((healthy, 5), (poisoned, 4))
    poisoned.tokens[-1] = 77
    batch = pair.blocks.batch([(poisoned, 1), (healthy, 1)])
    with torch.inference_mode():
        logits = pair.graphed.forward(batch)
    assert np.array_equal(logits.isfinite().all(dim=1), [False, True])
