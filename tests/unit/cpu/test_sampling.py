"""The sampling kernels against the torch path and the slow reference, on rows made to be awkward."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tokenmill_executor.runner import SamplingInput, SamplingParams, StepOutput
from tokenmill_executor.sampling import Sampler
from tokenmill_executor.sampling import kernels as sampling_kernels
from tokenmill_executor.sampling.kernels import SamplingKernels
from tokenmill_executor.sampling.uniform import uniforms

from tests.unit.cpu.small_models import needs_kernels, runnable_sets
from tests.unit.model import sampling_oracle as oracle

pytestmark = [needs_kernels, pytest.mark.parametrize("instruction_set", runnable_sets)]

TORCH = Sampler((2,))
# One token, parts of a vector, of a chunk of 256, whole ones, several with a rest, and a real vocabulary.
VOCABULARIES = (1, 2, 15, 16, 17, 255, 256, 257, 1000, 4099, 50257)
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "plain": {},
    "freezing": {"temperature": 1e-3},
    "boiling": {"temperature": 100.0},
    "top_k 1": {"top_k": 1},
    "top_k": {"top_k": 40, "temperature": 0.8},
    "more top_k than groups of logits": {"top_k": 3900, "temperature": 2.0},
    "top_k beyond the vocabulary": {"top_k": 10**6},
    "top_p": {"top_p": 0.95, "temperature": 0.8},
    "tiny top_p": {"top_p": 1e-7},
    "top_p of nearly all": {"top_p": 0.999999},
    "flat top_p": {"top_p": 0.9, "temperature": 50.0},
    "min_p": {"min_p": 0.05},
    "tiny min_p": {"min_p": 1e-9, "temperature": 3.0},
    "min_p 1": {"min_p": 1.0},
    "top_k and top_p": {"top_k": 300, "top_p": 0.6, "temperature": 1.5},
    "all truncations": {"top_k": 20, "top_p": 0.7, "min_p": 0.05, "temperature": 1.3},
    "top_p and min_p": {"top_p": 0.9, "min_p": 0.001, "temperature": 1.7},
}


def kernels(instruction_set: str, threads: int = 2) -> Sampler:
    return Sampler((2,), SamplingKernels(threads, instruction_set))


def sampling(seed: int, **params: Any) -> SamplingInput:
    return SamplingInput(seed, [0] * (1 + seed % 7), 1, SamplingParams(max_tokens=9, seed=seed, **params))


def rows_of(kind: str, rows: int, vocab: int) -> torch.Tensor:
    random = torch.randn((rows, vocab), generator=torch.Generator().manual_seed(vocab)) * 3
    if kind == "ties":
        return (random * 2).round() / 2
    if kind == "all tie":
        return torch.full_like(random, -7.25)
    if kind == "masked":
        masked = random.masked_fill(torch.rand(random.shape, generator=torch.Generator().manual_seed(1)) < 0.7, -torch.inf)
        return torch.where(masked.isinf().all(1, keepdim=True), random, masked)
    if kind == "peaked":
        random[:, vocab // 2] += 200.0
    if kind == "large":
        return random * 1e30 + 3e30
    return random


def assert_alike(found: StepOutput, expected: StepOutput) -> None:
    assert found.token_ids == expected.token_ids
    assert found.errors == expected.errors
    assert sorted(found.logprobs) == sorted(expected.logprobs)


@pytest.mark.parametrize("kind", ["random", "ties", "all tie", "masked", "peaked", "large"])
def test_tokens_are_those_of_torch(instruction_set: str, kind: str) -> None:
    sampler = kernels(instruction_set)
    for vocab in VOCABULARIES:
        samples = [sampling(seed, **params) for seed, params in enumerate(PARAMS.values())]
        logits = rows_of(kind, len(samples), vocab)
        assert_alike(sampler.sample(logits, samples), TORCH.sample(logits, samples))


@pytest.mark.parametrize("params", PARAMS.values(), ids=list(PARAMS))
def test_many_draws_are_those_of_the_reference(instruction_set: str, params: dict[str, Any]) -> None:
    logits = rows_of("random", 1, 700)[0]
    samples = [sampling(seed, **params) for seed in range(300)]
    distribution = oracle.probabilities(logits.double().numpy(), samples[0])
    numbers = uniforms([sample.params.seed for sample in samples], [len(sample.token_ids) for sample in samples])
    found = kernels(instruction_set).sample(logits.expand(len(samples), -1), samples).token_ids
    assert found == [oracle.invert(distribution, number) for number in numbers]


def test_a_row_does_not_hang_on_batch_or_threads(instruction_set: str) -> None:
    samples = [sampling(seed, **params) for seed, params in enumerate(PARAMS.values())] * 3
    logits = rows_of("ties", len(samples), 5000)
    together = kernels(instruction_set, threads=3).sample(logits, samples).token_ids
    alone = kernels(instruction_set, threads=1)
    assert together == [alone.sample(logits[row : row + 1], [sample]).token_ids[0] for row, sample in enumerate(samples)]


def test_logits_that_are_not_contiguous(instruction_set: str) -> None:
    samples = [sampling(seed, top_p=0.9) for seed in range(6)]
    logits = rows_of("random", 6, 600)
    expected = TORCH.sample(logits, samples)
    assert_alike(kernels(instruction_set).sample(logits.T.contiguous().T, samples), expected)
    wide = torch.cat((logits, logits), 1)[:, :600]
    assert_alike(kernels(instruction_set).sample(wide, samples), expected)


def test_edited_rows_among_others(instruction_set: str) -> None:
    """And the caller's logits stay as they are."""
    edits: list[dict[str, Any]] = [{}, {"repetition_penalty": 1.8}, {"logit_bias": ((5, 30.0),)}, {"min_tokens": 99}]
    samples = [sampling(seed, **edits[seed % 4], **params) for seed, params in enumerate(PARAMS.values()) for _ in range(4)]
    logits = rows_of("random", len(samples), 900)
    before = logits.clone()
    assert_alike(kernels(instruction_set).sample(logits, samples), TORCH.sample(logits, samples))
    assert torch.equal(logits, before)


@pytest.mark.parametrize("vocab", [1, 3, 300, 5000])
def test_logprobs_are_those_of_torch(instruction_set: str, vocab: int) -> None:
    samples = [sampling(seed, logprobs=count, temperature=0.7) for seed, count in enumerate((0, 1, 5, 20, 4000, 9000))]
    samples.append(sampling(9))
    logits = rows_of("random", len(samples), vocab)
    found, expected = kernels(instruction_set).sample(logits, samples), TORCH.sample(logits, samples)
    assert_alike(found, expected)
    for row in found.logprobs:
        of_row, wanted = found.logprobs[row], expected.logprobs[row]
        assert of_row.logprob == pytest.approx(wanted.logprob, abs=1e-5)
        assert [token for token, _ in of_row.top] == [token for token, _ in wanted.top]
        assert [value for _, value in of_row.top] == pytest.approx([value for _, value in wanted.top], abs=1e-5)


def test_of_tokens_that_tie_the_lower_ids_are_told_first(instruction_set: str) -> None:
    found = kernels(instruction_set).sample(rows_of("all tie", 1, 777), [sampling(0, temperature=0.0, logprobs=3)])
    assert found.token_ids == [0]
    assert [token for token, _ in found.logprobs[0].top] == [0, 1, 2]
    assert found.logprobs[0].logprob == pytest.approx(-np.log(777), abs=1e-6)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", [0, 17, 299])
def test_a_row_that_is_not_a_number_fails_alone(instruction_set: str, poison: float, place: int) -> None:
    samples = [sampling(seed, logprobs=2, **params) for seed, params in enumerate(PARAMS.values())]
    logits = rows_of("masked", len(samples), 300)
    logits[::2, place] = poison
    found, expected = kernels(instruction_set).sample(logits, samples), TORCH.sample(logits, samples)
    assert sorted(found.errors) == list(range(0, len(samples), 2))
    assert found.errors == expected.errors
    assert found.token_ids[1::2] == expected.token_ids[1::2]
    assert all(0 <= token < 300 for token in found.token_ids)


@pytest.mark.parametrize("kind", ["random", "ties", "all tie", "masked"])
@pytest.mark.parametrize("rows", [1, 5])
def test_plain_greedy_rows_take_their_first_largest(instruction_set: str, kind: str, rows: int) -> None:
    samples = [sampling(seed, temperature=0.0) for seed in range(rows)]
    # Rows that do not lie side by side, as those of a larger result.
    logits = rows_of(kind, rows, 1000)[:, :777]
    logits[-1, 300] = torch.nan
    found = kernels(instruction_set).sample(logits, samples)
    assert found.token_ids[:-1] == logits.numpy().argmax(-1).tolist()[:-1]
    assert list(found.errors) == [rows - 1]


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {}, {"top_p": 0.5}])
def test_a_row_whose_every_token_is_ruled_out_says_so(instruction_set: str, params: dict[str, Any]) -> None:
    masked = sampling(0, min_tokens=9, stop_token_ids=tuple(range(40)), **params)
    output = kernels(instruction_set).sample(rows_of("random", 2, 40), [masked, sampling(1, **params)])
    assert output.errors == {0: "no token is left to sample: min_tokens and stop_token_ids rule out every one"}


@pytest.mark.parametrize("params", [{}, {"temperature": 1.6}, {"top_k": 12}, {"top_p": 0.7, "temperature": 1.4}, {"min_p": 0.05}])
def test_draws_follow_the_distribution(instruction_set: str, params: dict[str, Any]) -> None:
    """Chi-square of 40,000 draws, tokens in four chunks, against the 99.9th percentile; truncated tokens never come."""
    logits = torch.full((1000,), -torch.inf)
    logits[::25] = rows_of("random", 1, 40)[0] / 2.5
    samples = [
        SamplingInput(0, [1] * length, 1, SamplingParams(max_tokens=9, seed=seed, **params))
        for seed in range(200)
        for length in range(1, 201)
    ]
    counts = np.bincount(kernels(instruction_set).sample(logits.expand(len(samples), -1), samples).token_ids, minlength=1000)
    expected = oracle.probabilities(logits.double().numpy(), samples[0]) * len(samples)
    kept = expected > 0
    assert counts[~kept].sum() == 0
    statistic = float(((counts[kept] - expected[kept]) ** 2 / expected[kept]).sum())
    freedom = int(kept.sum()) - 1
    # Wilson and Hilferty's approximation of the chi-square distribution's quantile.
    assert statistic < freedom * (1 - 2 / (9 * freedom) + 3.09 * (2 / (9 * freedom)) ** 0.5) ** 3


def test_uniform_numbers_at_both_ends(instruction_set: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """0 takes the first token that is left, the largest number below 1 the last that weighs anything; never one that is masked."""
    logits = torch.full((4, 1030), -torch.inf)
    logits[:, [300, 301, 900]] = torch.tensor([0.0, 2.0, 1.0])
    variants: list[dict[str, Any]] = [{}, {"top_k": 3}, {"top_p": 0.99}, {"min_p": 0.01}]
    samples = [sampling(seed, **params) for seed, params in enumerate(variants)]
    for number, token in ((0.0, 300), (1 - 2.0**-52, 900)):
        monkeypatch.setattr(
            sampling_kernels, "uniforms_of_steps", lambda rows, steps, number=number: np.full((steps, len(rows)), number)
        )
        assert kernels(instruction_set).sample(logits, samples).token_ids == [token] * 4
