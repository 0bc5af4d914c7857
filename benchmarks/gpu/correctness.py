"""Is what the device computes right? Against plain torch in float32 on the CPU, on mixed batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from tokenmill_executor.attention.backend import AttentionBackend, AttentionBatch, CacheShape
from tokenmill_executor.attention.reference import ReferenceAttention
from tokenmill_executor.attention.triton_backend import TritonAttention
from tokenmill_executor.engine import Engine
from tokenmill_executor.model.config import ModelConfig
from tokenmill_executor.model.cuda import cuda_draws
from tokenmill_executor.model.decoder import Decoder
from tokenmill_executor.model.linear import Linear
from tokenmill_executor.model.port import DecodeModel, Model
from tokenmill_executor.model.quantized_linear import QUANTIZED_LINEARS
from tokenmill_executor.model.runner import TorchRunner
from tokenmill_executor.records import Admission, Plan
from tokenmill_executor.runner import SamplingInput, SamplingParams
from tokenmill_executor.sampling import TorchDraws

from benchmarks.gpu.shapes import DRAWN, RandomTensors, Scale, graphed_decoder, make_capture, make_runner
from benchmarks.gpu.table import Table
from tests.fakes.batches import Blocks, Track

CPU = torch.device("cpu")
NUM_BLOCKS, BLOCK_SIZE = 512, 16
# Query heads, KV heads, head size, windows.
HEADS = ((32, 8, 128, (None, 100)), (9, 3, 64, (None,)), (8, 1, 80, (33,)))
# Largest error of attention over numbers of size one.
ATTENTION_BOUNDS = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}
# A number in a few thousands may get the code beside the reference's.
CACHE_BOUNDS = {"auto": 0.0, "int8": 5e-3, "int4": 5e-2, "fp8": 3e-2}
# Of the norm: e4m3 has three bits behind the first, int8 seven in all, over the largest of a row.
WEIGHT_BOUNDS = {"fp8": 0.06, "int8": 0.025}
_PRODUCT_ROWS = (1, 16, 40, 256)
# Of sequences that decode together.
_SAMPLED = (
    SamplingParams(1 << 16, seed=1, temperature=0.0, ignore_eos=True),
    SamplingParams(1 << 16, seed=2, temperature=0.9, top_p=0.9, ignore_eos=True),
    SamplingParams(1 << 16, seed=3, temperature=1.2, top_k=20, min_p=0.02, ignore_eos=True),
)
_ALIKE = 0.99
# Least agreement of logits with the CPU's in float32, as a cosine.
LOGIT_BOUNDS = {torch.float32: 0.99999, torch.bfloat16: 0.99}


def attention(scale: Scale, device: torch.device) -> Table:
    return _attention("Attention against the reference", scale.dtypes, ("auto",), device)


def quantised_caches(scale: Scale, device: torch.device) -> Table:
    """In the type that is served: to compile kernels for each takes longer than to run them, and float32 shows nothing more."""
    caches = tuple(cache for cache in CACHE_BOUNDS if cache != "auto")
    # Interpreted kernels take their time: one is enough to see that this runs.
    return _attention("Quantised caches", scale.dtypes[-1:], caches if device.type == "cuda" else ("int4",), device)


def _attention(title: str, dtypes: Sequence[torch.dtype], caches: Sequence[str], device: torch.device) -> Table:
    table = Table(title, ("heads", "type", "cache", "backend", "largest error", "bound", "right"))
    for heads in HEADS if device.type == "cuda" else HEADS[1:2]:
        for dtype in dtypes:
            for cache in caches:
                bound = max(ATTENTION_BOUNDS[dtype], CACHE_BOUNDS[cache])
                for name, error in _attention_errors(heads, dtype, device, cache).items():
                    table.wrong |= not error <= bound
                    shape = f"{heads[0]} / {heads[1]} × {heads[2]}"
                    table.rows.append((shape, _name(dtype), cache, name, error, bound, error <= bound))
    return table


def _attention_errors(
    heads: tuple[int, int, int, tuple[int | None, ...]], dtype: torch.dtype, device: torch.device, cache: str
) -> dict[str, float]:
    num_heads, kv_heads, head_dim, windows = heads
    shape = CacheShape(len(windows), num_heads, kv_heads, head_dim, windows, dtype, device, kv_cache_dtype=cache)
    truth = ReferenceAttention(replace(shape, dtype=torch.float32, device=CPU))
    candidates: dict[str, AttentionBackend] = {"Triton": TritonAttention(shape, None if device.type == "cuda" else 4)}
    if device.type == "cuda":
        candidates["torch"] = ReferenceAttention(shape)
    for backend in (truth, *candidates.values()):
        backend.allocate(NUM_BLOCKS, BLOCK_SIZE)
    errors = dict.fromkeys(candidates, 0.0)
    size = 1 if device.type == "cuda" else 8  # interpreted kernels take their time
    blocks = Blocks(NUM_BLOCKS, BLOCK_SIZE, groups=len(shape.layout.groups))
    long, short, late, single = (blocks.track([1] * (length // size)) for length in (1500, 40, 700, 8))
    generator = torch.Generator().manual_seed(0)
    for counts in (
        {0: 1400 // size, 1: 40 // size},
        {0: 100 // size - 4, 2: 690 // size, 3: 1},
        {0: 1, 1: 0, 2: 1},
        {0: 1},
    ):
        tracks = (long, short, late, single)
        batch = blocks.batch([(tracks[index], count) for index, count in counts.items() if count])
        sizes = [num_heads, kv_heads, kv_heads]
        fused = torch.randn(len(batch.token_ids), sum(sizes), head_dim, generator=generator).to(dtype)
        truth.prepare(AttentionBatch.of(batch, CPU))
        for backend in candidates.values():
            backend.prepare(AttentionBatch.of(batch, device))
        for layer in range(len(windows)):
            query, key, value = torch.split(fused.float(), sizes, dim=1)
            truth.write_kv(layer, key, value)
            expected = truth.attend(layer, query)
            query, key, value = torch.split(fused.to(device), sizes, dim=1)
            for name, backend in candidates.items():
                backend.write_kv(layer, key, value)
                error = (backend.attend(layer, query).float().cpu() - expected).abs().max()
                errors[name] = max(errors[name], float(error))
    return errors


@torch.inference_mode()
def quantised_weights(scale: Scale, device: torch.device) -> Table:
    """Products as `--quantization` has them, from graphs, beside float32's."""
    table = Table("Products of quantised weights", ("weights", "rows", "error", "bound", "right"))
    size, generator = scale.config.hidden_size, torch.Generator().manual_seed(0)
    weight, rows = (torch.randn(count, size, generator=generator).bfloat16() for count in (size, max(_PRODUCT_ROWS)))
    expected = rows.float() @ weight.float().T
    for name, make in QUANTIZED_LINEARS.items():
        linear, bound = make(weight.to(device), None), WEIGHT_BOUNDS[name]
        for count in _PRODUCT_ROWS:
            given = rows[:count].to(device)
            found = torch.empty((count, size), dtype=given.dtype, device=device)
            make_capture(device)(partial(_store_product, linear, given, found))()
            error = float((found.float().cpu() - expected[:count]).norm() / expected[:count].norm())
            table.wrong |= not error <= bound
            table.rows.append((name, count, error, bound, error <= bound))
    return table


def _store_product(linear: Linear, rows: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(linear(rows))


def small_model(scale: Scale, device: torch.device) -> Table:
    config = scale.small
    size = 1 if device.type == "cuda" else 8
    prompts = [[(7 * place + 3 * index) % 190 + 3 for place in range(length // size)] for index, length in enumerate((300, 90, 37))]
    tensors = RandomTensors(config, torch.float32, CPU)
    return _compare("A small random model against the CPU", config, tensors, scale, device, prompts)


def checkpoint(path: str, scale: Scale, device: torch.device) -> Table:
    from tokenmill_executor.model.weights import load_checkpoint

    loaded = load_checkpoint(path)
    prompts = [[(31 * place + index) % 40_000 + 100 for place in range(length)] for index, length in enumerate((64, 20, 7))]
    return _compare(f"{loaded.name} against the CPU", loaded.config, loaded.tensors, scale, device, prompts)


def _compare(
    title: str,
    config: ModelConfig,
    tensors: Mapping[str, torch.Tensor],
    scale: Scale,
    device: torch.device,
    prompts: list[list[int]],
) -> Table:
    """Every way is fed the CPU's greedy tokens, so one early difference does not hide the rest."""
    steps = 24 if device.type == "cuda" else 2
    truth = Decoder(config, tensors, torch.float32, CPU, config.max_model_len)
    expected, tokens = _logits(truth, prompts, steps, None)
    table = Table(title, ("way", "type", "least cosine of logits", "bound", "same greedy tokens", "right"))
    for name, make in _ways(config, tensors, device, len(prompts)).items():
        for dtype in scale.dtypes:
            got, _ = _logits(make(dtype), prompts, steps, tokens)
            cosine = float(torch.nn.functional.cosine_similarity(got, expected, dim=-1).min())
            same = float((got.argmax(-1) == expected.argmax(-1)).float().mean())
            right = cosine >= LOGIT_BOUNDS[dtype] and (dtype != torch.float32 or same == 1.0)
            table.wrong |= not right
            table.rows.append((name, _name(dtype), cosine, LOGIT_BOUNDS[dtype], same, right))
    return table


def _ways(
    config: ModelConfig, tensors: Mapping[str, torch.Tensor], device: torch.device, max_num_seqs: int
) -> dict[str, Callable[[torch.dtype], DecodeModel]]:
    ways: dict[str, Callable[[torch.dtype], DecodeModel]] = {
        "Triton and graphs": lambda dtype: graphed_decoder(config, tensors, dtype, device, max_num_seqs)
    }
    if device.type == "cuda":
        ways["torch"] = lambda dtype: Decoder(config, tensors, dtype, device, config.max_model_len)
    return ways


def several_steps(scale: Scale, device: torch.device) -> Table:
    """Greedy and seeded tokens of plans of several steps, beside those of single steps on the same device."""
    table = Table("Several steps in one plan are single steps", ("way", "type", "tokens", "alike", "right"))
    config = scale.small
    for name, make in _ways(config, RandomTensors(config, torch.float32, CPU), device, len(_SAMPLED)).items():
        for dtype in scale.dtypes:
            single, several = (_sampled(make_runner(make(dtype), dtype, device, mode), scale) for mode in (False, True))
            alike = sum(one == other for one, other in zip(single, several, strict=True))
            table.rows.append((name, _name(dtype), len(single), alike, alike == len(single)))
            table.wrong |= alike < len(single)
    return table


def _sampled(runner: TorchRunner, scale: Scale) -> list[int]:
    """Of sequences with short prompts that come to a second block."""
    engine = Engine(runner, NUM_BLOCKS, BLOCK_SIZE, len(_SAMPLED))
    admissions = [
        Admission(row, [(7 * place + row) % 190 + 3 for place in range(14 + row)], 14 + row, params)
        for row, params in enumerate(_SAMPLED, 1)
    ]
    ids, steps = [admission.sequence_id for admission in admissions], scale.plan_steps
    first = engine.carry_out(Plan(0, 1, (), admissions, ids, [64] * len(ids)))
    result = engine.carry_out(Plan(0, 2, (), (), ids, [steps] * len(ids), steps))
    assert not (*first.faults, *result.faults)
    return list(result.token_ids)


def draws(scale: Scale, device: torch.device) -> Table:
    """The kernel that draws tokens, beside torch's sort. Exponentials differ in their last digits, once in a long time a token."""
    table = Table("Drawn tokens against torch's", ("parameters", "rows", "share alike", "bound", "right"))
    rows = 256 if device.type == "cuda" else 2
    generator = torch.Generator().manual_seed(1)
    for name, params in DRAWN.items():
        samples = [SamplingInput(row, [1], 1, SamplingParams(1, seed=row, **params)) for row in range(rows)]
        logits = (3 * torch.randn(rows, scale.config.vocab_size, generator=generator)).to(device)
        maxima, greedy = logits.max(dim=-1)
        expected, got = (make(samples, 1, device).draw(0, logits, maxima, greedy) for make in (TorchDraws, cuda_draws("auto")))
        alike = float((got == expected).float().mean())
        table.wrong |= alike < _ALIKE
        table.rows.append((name, rows, alike, _ALIKE, alike >= _ALIKE))
    return table


@torch.inference_mode()
def _logits(
    model: Model, prompts: list[list[int]], steps: int, forced: list[list[int]] | None
) -> tuple[torch.Tensor, list[list[int]]]:
    """Prompts in two chunks, one of them joined by another's decode, then decodes. → [samples, vocab_size], and what to force."""
    model.allocate(NUM_BLOCKS, BLOCK_SIZE)
    blocks = Blocks(NUM_BLOCKS, BLOCK_SIZE, groups=len(model.block_groups))
    tracks = [blocks.track(prompt) for prompt in prompts]
    seen: list[torch.Tensor] = []
    taken: list[list[int]] = []

    def step(*advances: tuple[Track, int]) -> None:
        sampling = [track for track, count in advances if track.computed + count == len(track.tokens)]
        logits = model.forward(blocks.batch(advances)).cpu().clone()  # a graph's are overwritten by the next step
        taken.append(logits.argmax(-1).tolist() if forced is None else forced[len(taken)])
        seen.append(logits)
        for track, token in zip(sampling, taken[-1], strict=True):
            track.tokens.append(token)

    first, second, third = tracks
    half = len(prompts[0]) // 2
    step((first, half), (second, len(prompts[1])))
    step((second, 1), (first, len(prompts[0]) - half), (third, len(prompts[2])))
    for _ in range(steps):
        step(*((track, 1) for track in tracks))
    step((third, 1))
    return torch.cat(seen), taken


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
