"""Several decode steps whose tokens the host sees late: those of single steps, on a fake device that tells who waits for what."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from tokenmill_executor.attention.backend import CacheShape
from tokenmill_executor.attention.triton_backend import TritonAttention
from tokenmill_executor.engine import Engine
from tokenmill_executor.interrupt import Interrupt
from tokenmill_executor.model.config import config_from_hf
from tokenmill_executor.model.cuda_decodes import CudaDecodes
from tokenmill_executor.model.decoder import Decoder
from tokenmill_executor.model.graphs import GraphedDecoder, run_eagerly
from tokenmill_executor.model.port import DecodeModel
from tokenmill_executor.model.runner import TorchRunner
from tokenmill_executor.model.triton_ops import TritonOps
from tokenmill_executor.records import Admission, Plan, Result, SequenceFault, SequenceFinish
from tokenmill_executor.runner import Batch, RunnerDescription, SamplingParams, StepOutput
from tokenmill_executor.sampling import NOT_A_NUMBER, Sampler, TorchDraws
from torch.utils._python_dispatch import TorchDispatchMode

from tests.fakes.batches import Blocks, Track
from tests.fakes.models import TINY_SIZES, random_model

CPU = torch.device("cpu")
NUM_BLOCKS, BLOCK_SIZE, MAX_MODEL_LEN = 64, 4, 64
WINDOWS: dict[str, Any] = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
PARAMS = (
    SamplingParams(99, seed=1, temperature=0.0),
    SamplingParams(99, seed=2, temperature=1.3),
    SamplingParams(99, seed=3, temperature=0.9, top_p=0.8, min_p=0.01),
    SamplingParams(99, seed=-4, temperature=1.7, top_k=7),
)
# Contexts in mid-block, at the end of one and at the beginning of one.
LENGTHS = (3, 8, 13)
# What cannot be queued behind other work: its result, or how long that is, the host has to know. So it is of indexing by a mask.
HOST_READS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default, torch.ops.aten.equal.default}
INDEXING = {torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default}


@dataclass
class FakeDevice:
    """Its clock and its way down. `log` has launches and reads, by step; a time can be asked for once what it ends was read."""

    log: list[tuple[str, int]] = field(default_factory=list)
    marks: int = 0
    fetched: int = 0
    reached: int = 0

    def mark(self) -> object:
        self.marks += 1
        return self.marks

    def seconds(self, begin: object, end: object) -> float:
        assert isinstance(begin, int)
        assert isinstance(end, int)
        assert begin < end <= self.reached, "nobody has waited for that yet"
        return float(end - begin)

    def fetch(self, tensor: torch.Tensor) -> FakeDownload:
        self.fetched += 1
        return FakeDownload(self, self.fetched - 1, self.marks, tensor.clone())


@dataclass
class FakeDownload:
    """Of what the tensor was when it was asked for."""

    device: FakeDevice
    number: int
    marks: int
    tensor: torch.Tensor

    def wait(self) -> torch.Tensor:
        self.device.log.append(("read", self.number))
        self.device.reached = self.marks
        return self.tensor


class NoHostReads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        by_mask = func in INDEXING and any(index is not None and index.dtype == torch.bool for index in args[1])
        assert not by_mask, "the host would wait for how many there are"
        assert func not in HOST_READS, f"the host would wait for {func}"
        return func(*args, **(kwargs or {}))


class WatchedModel:
    """Tells the device's log of its launches, which must not wait."""

    def __init__(self, model: DecodeModel, device: FakeDevice, on_launch: Callable[[int], None] = lambda _: None) -> None:
        self._model = model
        self._device = device
        self._on_launch = on_launch
        self.block_size = BLOCK_SIZE

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def decode(self, batch: Batch, token_ids: torch.Tensor) -> torch.Tensor:
        number = sum(what == "launch" for what, _ in self._device.log)
        self._device.log.append(("launch", number))
        self._on_launch(number)
        with NoHostReads():  # type: ignore[no-untyped-call]
            return self._model.decode(batch, token_ids)


class NoWaitDraws(TorchDraws):
    """As on CUDA without Triton."""

    def __init__(self, samples: Sequence[Any], steps: int, device: torch.device) -> None:
        super().__init__(samples, steps, device, widths=())

    def draw(self, *given: Any) -> torch.Tensor:
        with NoHostReads():  # type: ignore[no-untyped-call]
            return super().draw(*given)


def make_model(kind: str, family: str = "llama", max_num_seqs: int = 4, poison: int | None = None, **changes: Any) -> DecodeModel:
    """Decoded with graphs, which are computed again, or on the reference attention."""
    oracle = random_model(family, **TINY_SIZES, **changes)
    if poison is not None:
        with torch.no_grad():
            oracle.get_input_embeddings().weight[poison] = torch.nan
    config, tensors = config_from_hf(oracle.config.to_dict()), oracle.state_dict()
    given = (config, tensors, torch.float32, CPU, MAX_MODEL_LEN)
    model: DecodeModel
    if kind == "reference":
        model = Decoder(*given)
    else:
        attention = TritonAttention(CacheShape.of(config, torch.float32, CPU), num_processors=1)
        decoder = Decoder(*given, lambda _: attention, TritonOps())
        model = GraphedDecoder(decoder, attention, lambda: run_eagerly, max_num_seqs, MAX_MODEL_LEN)
    model.allocate(NUM_BLOCKS, BLOCK_SIZE)
    return model


class Bench:
    """Sequences whose contexts, but for the last token, are in the model's cache, with blocks for many more."""

    def __init__(self, model: DecodeModel, lengths: Sequence[int] = LENGTHS, params: Sequence[SamplingParams] = PARAMS) -> None:
        self.model = model
        self.device = FakeDevice()
        self.on_launch: Callable[[int], None] = lambda _: None
        self.blocks = Blocks(NUM_BLOCKS, BLOCK_SIZE, groups=len(model.block_groups))
        self.tracks: list[Track] = []
        for row, length in enumerate(lengths):
            self.tracks.append(
                self.blocks.track([3 + (7 * row + place) % 80 for place in range(length)], params[row % len(params)])
            )
            self.blocks.reserve(self.tracks[-1], length + 16)
        self.compute_prompts()

    @torch.inference_mode()
    def compute_prompts(self) -> None:
        self.model.forward(self.blocks.batch([(track, len(track.tokens) - 1) for track in self.tracks]))

    def batch(self) -> Batch:
        batch = self.blocks.batch([(track, 1) for track in self.tracks])
        for track in self.tracks:
            track.computed -= 1
        return batch

    @torch.inference_mode()
    def one_by_one(self, steps: int) -> list[StepOutput]:
        """And leaves all as it was, but for the cache, where the same is written again."""
        sampler, found = Sampler((0,)), []
        for _ in range(steps):
            batch = self.batch()
            found.append(sampler.sample(self.model.forward(batch), batch.samples))
            for track, token in zip(self.tracks, found[-1].token_ids, strict=True):
                track.tokens.append(token)
                track.computed += 1
        for track in self.tracks:
            del track.tokens[len(track.tokens) - steps :]
            track.computed -= steps
        return found

    @torch.inference_mode()
    def together(self, steps: int, ends: frozenset[int] = frozenset(), interrupt: Interrupt | None = None) -> list[StepOutput]:
        batch = self.batch()
        batch = replace(batch, samples=[replace(sample, ends=ends) for sample in batch.samples])
        model = WatchedModel(self.model, self.device, self.on_launch)
        decodes = CudaDecodes(model, NoWaitDraws, CPU, self.device, self.device.fetch)
        return decodes.steps(batch, steps, interrupt or Interrupt())


def tokens_of(outputs: Sequence[StepOutput]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize(
    ("kind", "family", "steps", "changes"),
    [
        ("reference", "llama", 12, {}),
        ("reference", "gemma3_text", 12, WINDOWS),
        ("graphs", "qwen3", 5, {}),
        ("graphs", "gemma3_text", 5, WINDOWS),
    ],
    ids=["reference", "reference, groups with and without a window", "graphs", "graphs, groups with and without a window"],
)
def test_tokens_are_those_of_single_steps(kind: str, family: str, steps: int, changes: dict[str, Any]) -> None:
    """Beyond the block that each begins in; three rows, for which a graph has four."""
    bench = Bench(make_model(kind, family, **changes))
    expected = tokens_of(bench.one_by_one(steps))
    assert len({token for step in expected for token in step}) > steps, "what is drawn has to vary"
    outputs = bench.together(steps)
    assert tokens_of(outputs) == expected
    assert all((output.errors, output.forward_s, output.sample_s) == ({}, 1.0, 1.0) for output in outputs)


def test_each_step_is_launched_before_the_tokens_of_the_one_ahead_are_read() -> None:
    bench = Bench(make_model("reference"))
    bench.together(4)
    launch, read = "launch", "read"
    assert bench.device.log == [(launch, 0), (launch, 1), (read, 0), (launch, 2), (read, 1), (launch, 3), (read, 2), (read, 3)]


def test_a_single_step_is_one_launch_and_one_read() -> None:
    bench = Bench(make_model("reference"))
    assert tokens_of(bench.together(1)) == tokens_of(bench.one_by_one(1))
    assert bench.device.log == [("launch", 0), ("read", 0)]


def test_all_parameters_beside_each_other_and_a_batch_larger_than_any_graph() -> None:
    bench = Bench(make_model("graphs", max_num_seqs=2), lengths=(3, 8, 5, 6))
    assert tokens_of(bench.together(3)) == tokens_of(bench.one_by_one(3))


def test_steps_go_from_graph_to_graph_where_contexts_come_to_want_more_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenmill_executor.attention.triton_backend._POSITIONS_PER_SPLIT", 8)
    model = make_model("graphs", max_num_seqs=2)
    assert isinstance(model, GraphedDecoder)
    bench = Bench(model, lengths=(6, 23))
    ran: list[tuple[int, int]] = []
    # Contexts of 23 and 24 positions are three parts of 8, those of 25 four.
    for kind in ((2, 2), (2, 4)):
        model._replays[kind] = _telling(ran, kind, model._replays[kind])
    together = tokens_of(bench.together(3))
    assert ran == [(2, 2), (2, 2), (2, 4)]
    assert together == tokens_of(bench.one_by_one(3))


def _telling(ran: list[tuple[int, int]], kind: tuple[int, int], replay: Callable[[], None]) -> Callable[[], None]:
    def run() -> None:
        ran.append(kind)
        replay()

    return run


def test_an_end_is_heeded_one_step_late() -> None:
    bench = Bench(make_model("reference"))
    expected = tokens_of(bench.one_by_one(12))
    ends = frozenset({expected[5][1], -1})
    last = next(step for step, tokens in enumerate(expected) if ends & set(tokens))
    assert 0 < last <= 5
    assert tokens_of(bench.together(12, ends)) == expected[: last + 2]


def test_no_step_begins_after_one_in_which_it_was_interrupted() -> None:
    bench, interrupt = Bench(make_model("reference")), Interrupt()
    expected = tokens_of(bench.one_by_one(12))
    bench.on_launch = lambda step: interrupt.ask() if step == 3 else None
    assert tokens_of(bench.together(12, interrupt=interrupt)) == expected[:4]
    interrupt.heed()
    bench.on_launch = lambda _: None
    assert tokens_of(bench.together(3, interrupt=interrupt)) == expected[:3]


@pytest.mark.parametrize("kind", ["reference", "graphs"])
def test_logits_that_are_no_numbers_are_told_by_row_and_leave_no_trace(kind: str) -> None:
    healthy = Bench(make_model(kind))
    expected = tokens_of(healthy.one_by_one(4))
    known = {token for track in healthy.tracks for token in track.tokens}
    # A token that is new to all makes the step that follows it fail in its row.
    step, row = next(
        (step, row)
        for step, tokens in enumerate(expected)
        for row, token in enumerate(tokens)
        if token not in known | {token for before in expected[:step] for token in before} and tokens.count(token) == 1
    )
    bench = Bench(make_model(kind, poison=expected[step][row]))
    outputs = bench.together(4)
    assert len(outputs) == step + 3
    assert tokens_of(outputs[: step + 1]) == expected[: step + 1]
    # The second was launched before the first was looked at.
    assert [output.errors for output in outputs[step + 1 :]] == [{row: NOT_A_NUMBER}] * 2
    others = [[token for other, token in enumerate(tokens) if other != row] for tokens in expected]
    assert [[token for other, token in enumerate(tokens) if other != row] for tokens in tokens_of(outputs)] == others[: step + 3]
    assert all(bool(part.view(torch.float32).isfinite().all()) for part in bench.model.storage())


# ---- under the engine ----------------------------------------------------------------------------------------------------------


def engine_of(model: DecodeModel, late: bool, device: FakeDevice | None = None) -> Engine:
    description = RunnerDescription("random", 211, MAX_MODEL_LEN, (2,), "cpu", "float32", model.block_groups)
    device = device or FakeDevice()
    decodes = CudaDecodes(WatchedModel(model, device), NoWaitDraws, CPU, device, device.fetch) if late else None
    return Engine(TorchRunner(model, description, {}, CPU, lambda: 0, None, decodes), NUM_BLOCKS, BLOCK_SIZE, 8)


def carry_out(engine: Engine, plans: int, admissions: Sequence[Admission]) -> list[Result]:
    """The prompts, then plans of nine steps until all sequences are over."""
    ids = [admission.sequence_id for admission in admissions]
    results = [engine.carry_out(Plan(7, 1, (), admissions, ids, [64] * len(ids)))]
    for number in range(2, 2 + plans):
        results.append(engine.carry_out(Plan(7, number, (), (), ids, [9] * len(ids), max_steps=9)))
        engine.check()
    return results


def told(results: Sequence[Result]) -> list[object]:
    """All but the times."""
    return [
        (r.num_computed, r.token_ids, r.finishes, r.blocks, [(f.sequence_id, f.fault) for f in r.faults], r.num_steps)
        for r in results
    ]


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_under_the_engine_nothing_tells_them_from_single_steps(family: str) -> None:
    """Sequences end by a stop token, by their length and at fault, in mid-run, and others go on; Gemma's layers have two groups."""
    changes = WINDOWS if family == "gemma3_text" else {}
    admissions = [
        Admission(row, [3 + (7 * row + place) % 80 for place in range(length)], length, replace(params, max_tokens=20 + row))
        for row, (length, params) in enumerate(zip((3, 8, 13, 5), PARAMS, strict=True), 1)
    ]
    (_, first, *_) = carry_out(engine_of(make_model("reference", family, **changes), late=False), 1, admissions)
    stopped, poisoned = first.token_ids[9 + 4], first.token_ids[3 * 9 + 2]
    admissions[1] = replace(admissions[1], params=replace(admissions[1].params, stop_token_ids=(stopped,)))
    # Where embeddings are the head too, one that is no number spoils the logits of all.
    poison = poisoned if family == "llama" else None
    single, late = (
        carry_out(engine_of(make_model("reference", family, poison=poison, **changes), late), 3, admissions)
        for late in (False, True)
    )
    assert told(late) == told(single)
    assert [fault.fault for result in late for fault in result.faults] == [SequenceFault.ERROR] * (family == "llama")
    assert {finish for result in late for finish in result.finishes} == set(SequenceFinish)
    assert late[-1].blocks.held == 0


def test_a_sequence_with_penalties_has_each_step_looked_at() -> None:
    model, device = make_model("reference"), FakeDevice()
    params = [replace(PARAMS[0], max_tokens=30), replace(PARAMS[1], max_tokens=30, repetition_penalty=1.2)]
    admissions = [Admission(row, [3, 4, 5 + row], 3, given) for row, given in enumerate(params, 1)]
    engine = engine_of(model, True, device)
    assert [result.num_steps for result in carry_out(engine, 2, admissions)] == [1, 9, 9]
    assert device.log == []
    engine.carry_out(Plan(7, 4, (2,), (), (1,), (9,), max_steps=9))
    assert len(device.log) == 18
