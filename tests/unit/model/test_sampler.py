"""The sampler against a slow reference, parameter by parameter, and its independence of batch and path."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenmill_executor.runner import SamplingInput, SamplingParams
from tokenmill_executor.sampling import Sampler, draw
from tokenmill_executor.sampling.kernels import SamplingKernels
from tokenmill_executor.sampling.uniform import uniforms

from tests.unit.cpu.small_models import needs_kernels
from tests.unit.model import sampling_oracle as oracle

EOS = (2, 5)
VOCAB = 400
# Of seeds 0, 1, 2^64 - 1 at positions 0, 5, 2^31.
PINNED = [0.6524484863740321, 0.7743991716672016, 0.16108300974245582]


@pytest.fixture(scope="module", params=["torch", pytest.param("kernels", marks=needs_kernels)])
def sampler(request: pytest.FixtureRequest) -> Sampler:
    return Sampler(EOS, SamplingKernels(2) if request.param == "kernels" else None)


def sampling(
    seed: int = 0, tokens: tuple[int, ...] = (7, 8, 9, 7), prompt: int = 2, sequence_id: int = 0, **params: Any
) -> SamplingInput:
    return SamplingInput(sequence_id, list(tokens), prompt, SamplingParams(max_tokens=99, seed=seed, **params))


def logits_of(rows: int, seed: int = 0, vocab: int = VOCAB, spread: float = 3.0) -> torch.Tensor:
    return torch.randn((rows, vocab), generator=torch.Generator().manual_seed(seed)) * spread


def expected_token(logits: torch.Tensor, sample: SamplingInput) -> int:
    changed = oracle.edited(logits.double().numpy(), sample, EOS)
    uniform = uniforms([sample.params.seed], [len(sample.token_ids)])[0]
    return oracle.invert(oracle.probabilities(changed, sample), uniform)


VARIANTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "plain": {},
    "cold": {"temperature": 0.3},
    "hot": {"temperature": 1.9},
    "top_k": {"top_k": 5},
    "top_k 1": {"top_k": 1},
    "top_k beyond the vocabulary": {"top_k": 10**6},
    "top_p": {"top_p": 0.8},
    "tiny top_p": {"top_p": 1e-6},
    "flat top_p": {"top_p": 0.999, "temperature": 50.0},
    "min_p": {"min_p": 0.1},
    "min_p 1": {"min_p": 1.0},
    "all truncations": {"top_k": 20, "top_p": 0.7, "min_p": 0.05, "temperature": 1.3},
    "repetition": {"repetition_penalty": 1.7},
    "repetition below 1": {"repetition_penalty": 0.6},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.8},
    "negative penalties": {"presence_penalty": -2.0, "frequency_penalty": -1.0},
    "bias": {"logit_bias": ((0, 4.0), (VOCAB - 1, 6.5), (9, -100.0))},
    "min_tokens": {"min_tokens": 3, "stop_token_ids": (11, 12), "logit_bias": ((2, 50.0), (11, 49.0), (5, 48.0), (12, 47.0))},
    "min_tokens reached": {"min_tokens": 2, "logit_bias": ((2, 50.0),)},
    "greedy with penalties": {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
}


@pytest.mark.parametrize("tokens", [(7, 8, 9, 7), (7, 8, 9, 9)], ids=["once", "twice"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_each_parameter_as_the_reference(sampler: Sampler, variant: str, tokens: tuple[int, ...]) -> None:
    """The last two prompt tokens and the two output tokens are made likely, so that penalties matter."""
    samples = [sampling(seed, tokens, **VARIANTS[variant]) for seed in range(40)]
    logits = logits_of(len(samples))
    logits[:, [7, 8, 9]] += 4.0
    output = sampler.sample(logits, samples)
    assert output.token_ids == [expected_token(row, sample) for row, sample in zip(logits, samples, strict=True)]
    assert not output.errors


def test_rows_of_all_kinds_in_one_batch_as_each_alone(sampler: Sampler) -> None:
    samples = [sampling(seed, **params) for seed, params in enumerate(VARIANTS.values())]
    logits = logits_of(len(samples), seed=3)
    together = sampler.sample(logits, samples).token_ids
    assert together == [sampler.sample(logits[row : row + 1], [sample]).token_ids[0] for row, sample in enumerate(samples)]
    assert together == [expected_token(row, sample) for row, sample in zip(logits, samples, strict=True)]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**64 - 1),
    st.sampled_from([0.0, 0.2, 1.0, 4.0]),
    st.integers(0, 60),
    st.sampled_from([0.05, 0.5, 0.95, 1.0]),
    st.sampled_from([0.0, 0.02, 0.5]),
    st.sampled_from([0.8, 1.0, 1.4]),
    st.lists(st.integers(0, 49), min_size=1, max_size=30),
)
def test_any_mixture_of_parameters_as_the_reference(
    sampler: Sampler, seed: int, temperature: float, top_k: int, top_p: float, min_p: float, penalty: float, tokens: list[int]
) -> None:
    sample = sampling(
        seed, tuple(tokens), 1, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=penalty
    )
    logits = logits_of(1, seed % 1000, vocab=50)
    assert sampler.sample(logits, [sample]).token_ids == [expected_token(logits[0], sample)]


@pytest.mark.parametrize("params", [{"top_p": 0.9}, {"top_k": 40}, {"top_k": 300, "top_p": 0.5}, {"min_p": 0.01}, {"min_p": 1e-6}])
def test_the_path_taken_does_not_change_the_token(params: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits rounded so that ties fall everywhere, also across the edge of what is looked at first."""
    samples = [sampling(seed, **params) for seed in range(60)]
    logits = (logits_of(len(samples), spread=1.5) * 4).round() / 4
    results = []
    for widths in ((), (4,), (4, 64), (256,)):
        monkeypatch.setattr(draw, "WIDTHS", widths)
        results.append(Sampler(EOS).sample(logits, samples).token_ids)
    assert results[0] == results[1] == results[2] == results[3]
    assert results[0] == [expected_token(row, sample) for row, sample in zip(logits, samples, strict=True)]


def test_c28_a_seeded_sequence_draws_alike_whatever_the_batch_or_its_past(sampler: Sampler) -> None:
    """At one position: alone, among others in any place, fresh after a preemption or grown step by step."""
    logits = logits_of(6, seed=5)
    params: dict[str, Any] = {"temperature": 1.1, "top_p": 0.9, "frequency_penalty": 0.4, "repetition_penalty": 1.2}
    grown = sampling(77, (7, 8), 2, **params)
    tokens: list[int] = []
    for step in range(6):
        others = [sampling(seed, sequence_id=seed) for seed in range(1, 6)]
        place = step % 6
        rows = torch.roll(logits, 1 + place, 0)
        rows[place] = logits[step]
        output = sampler.sample(rows, [*others[:place], grown, *others[place:]])
        tokens.append(output.token_ids[place])
        grown.token_ids.append(tokens[-1])  # type: ignore[attr-defined]
    fresh = [sampling(77, (7, 8, *tokens[:step]), 2, sequence_id=100 + step, **params) for step in range(6)]
    assert [sampler.sample(logits[step : step + 1], [fresh[step]]).token_ids[0] for step in range(6)] == tokens
    assert sampler.sample(logits, fresh).token_ids == tokens


def test_penalties_follow_a_sequence_as_it_grows(sampler: Sampler) -> None:
    """The counts kept with a sequence equal those made anew, over more distinct tokens than fit at first."""
    params: dict[str, Any] = {"temperature": 0.0, "frequency_penalty": 0.7, "presence_penalty": 0.3, "repetition_penalty": 1.1}
    grown = sampling(0, tuple(range(50)), 40, **params)
    for step in range(120):
        logits = logits_of(1, seed=step, spread=0.5)
        token = sampler.sample(logits, [grown]).token_ids[0]
        assert token == expected_token(logits[0], grown)
        grown.token_ids.append(token)  # type: ignore[attr-defined]


def test_sampling_a_step_again_gives_the_same(sampler: Sampler) -> None:
    """The engine runs parts of a failed step again."""
    samples = [sampling(seed, presence_penalty=1.0) for seed in range(5)]
    logits = logits_of(5)
    before = logits.clone()
    assert sampler.sample(logits, samples).token_ids == sampler.sample(logits, samples).token_ids
    assert torch.equal(logits, before)


def test_logprobs_are_of_the_distribution_before_temperature_and_truncation_after_edits(sampler: Sampler) -> None:
    samples = [
        sampling(1, temperature=0.0, logprobs=0),
        sampling(2, temperature=0.4, top_k=3, repetition_penalty=1.5, logprobs=4),
        sampling(3),
        sampling(4, logit_bias=((3, 20.0),), min_tokens=9, logprobs=20),
    ]
    logits = logits_of(4)
    output = sampler.sample(logits, samples)
    assert sorted(output.logprobs) == [0, 1, 3]
    for row, found in output.logprobs.items():
        expected = np.log(oracle.softmax(oracle.edited(logits[row].double().numpy(), samples[row], EOS)) + 1e-300)
        assert found.logprob == pytest.approx(expected[output.token_ids[row]], abs=1e-5)
        order = np.argsort(-expected)[: samples[row].params.logprobs]
        assert [token for token, _ in found.top] == order.tolist()
        assert [value for _, value in found.top] == pytest.approx(expected[order].tolist(), abs=1e-5)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_row_that_is_not_a_number_fails_alone(sampler: Sampler, poison: float) -> None:
    variants: list[dict[str, Any]] = [{"temperature": 0.0}, {}, {"top_p": 0.5}, {"repetition_penalty": 1.1, "logprobs": 2}]
    samples = [sampling(seed, **variant) for seed, variant in enumerate(variants * 2)]
    logits = logits_of(8)
    healthy = sampler.sample(logits, samples)
    logits[4:, 17] = poison
    output = sampler.sample(logits, samples)
    assert sorted(output.errors) == [4, 5, 6, 7]
    assert output.token_ids[:4] == healthy.token_ids[:4]
    assert sorted(output.logprobs) == [3]
    assert all(0 <= token < VOCAB for token in output.token_ids)


def test_no_rows(sampler: Sampler) -> None:
    output = sampler.sample(torch.empty(0, VOCAB), [])
    assert (output.token_ids, output.errors, output.logprobs) == ([], {}, {})


@pytest.mark.parametrize("params", [{}, {"top_k": 12}, {"top_p": 0.7, "temperature": 1.4}, {"min_p": 0.05}])
def test_draws_follow_the_distribution(sampler: Sampler, params: dict[str, Any]) -> None:
    """Chi-square of 40,000 draws over positions and seeds, against the 99.9th percentile; truncated tokens never come."""
    logits = logits_of(1, seed=9, vocab=40, spread=1.2)
    samples = [sampling(seed, (1,) * length, 1, **params) for seed in range(200) for length in range(1, 201)]
    drawn = sampler.sample(logits.expand(len(samples), -1), samples).token_ids
    counts = np.bincount(drawn, minlength=40)
    expected = oracle.probabilities(logits[0].double().numpy(), samples[0]) * len(samples)
    kept = expected > 0
    assert counts[~kept].sum() == 0
    statistic = float(((counts[kept] - expected[kept]) ** 2 / expected[kept]).sum())
    freedom = int(kept.sum()) - 1
    # Wilson and Hilferty's approximation of the chi-square distribution's quantile.
    limit = freedom * (1 - 2 / (9 * freedom) + 3.09 * (2 / (9 * freedom)) ** 0.5) ** 3
    assert statistic < limit


def test_uniform_numbers_are_fixed_for_all_time() -> None:
    """A stored sequence must draw alike after an upgrade: these values may never change."""
    assert uniforms([0, 1, 2**64 - 1], [0, 5, 2**31]).tolist() == PINNED
    assert uniforms([3], [4])[0] == uniforms([9, 3], [4, 4])[1]


def test_uniform_numbers_are_even_and_independent_of_neighbours() -> None:
    grid = uniforms([seed for seed in range(300) for _ in range(300)], list(range(300)) * 300).reshape(300, 300)
    counts, _ = np.histogram(grid, bins=100, range=(0, 1))
    assert float(((counts - 900) ** 2 / 900).sum()) < 150  # 99.9th percentile of 99 degrees of freedom: 148.2
    for neighbours in ((grid[1:], grid[:-1]), (grid[:, 1:], grid[:, :-1])):
        assert abs(np.corrcoef(neighbours[0].ravel(), neighbours[1].ravel())[0, 1]) < 0.015


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {}, {"top_k": 5}])
def test_a_row_whose_every_token_is_ruled_out_says_so(sampler: Sampler, params: dict[str, Any]) -> None:
    stops = tuple(range(VOCAB))
    masked = sampling(min_tokens=9, stop_token_ids=stops, **params)
    not_yet_ended = sampling(min_tokens=0, stop_token_ids=stops, **params)
    output = sampler.sample(logits_of(2), [masked, not_yet_ended])
    assert output.errors == {0: "no token is left to sample: min_tokens and stop_token_ids rule out every one"}


def test_a_bias_against_every_token_is_none(sampler: Sampler) -> None:
    against_all = sampling(logit_bias=tuple((token, -100.0) for token in range(VOCAB)))
    output = sampler.sample(logits_of(2).index_select(0, torch.tensor([0, 0])), [against_all, sampling()])
    assert not output.errors
    assert output.token_ids[0] == output.token_ids[1]
