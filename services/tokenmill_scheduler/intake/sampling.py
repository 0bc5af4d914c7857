"""Sampling parameters: each against the range written beside it in `types.proto`, defaults filled in.

Comparisons are written so that NaN fails them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tokenmill.inference.v1.types_pb2 import SamplingParams

from tokenmill_scheduler.core.choices import MAX_CHOICES
from tokenmill_scheduler.core.request import Sampling
from tokenmill_scheduler.intake.violations import Violations

MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_LOGIT_BIAS = 100.0
MAX_BIASED_TOKENS = 1_024


@dataclass(frozen=True, slots=True)
class _Rule:
    holds: Callable[[float], bool]
    words: str


_RULES = {
    "temperature": _Rule(lambda v: 0 <= v < math.inf, "must be finite and at least 0"),
    "top_p": _Rule(lambda v: 0 < v <= 1, "must be above 0 and at most 1"),
    "top_k": _Rule(lambda v: v >= -1, "must be at least 1, or 0 or -1 to turn it off"),
    "min_p": _Rule(lambda v: 0 <= v <= 1, "must be from 0 to 1"),
    # Nearer to 0, or beyond, logits are divided or multiplied into infinity. (In 32 bits 0.01 is a little less.)
    "repetition_penalty": _Rule(lambda v: 0.0099 < v <= 100, "must be from 0.01 to 100"),
    "presence_penalty": _Rule(lambda v: -2 <= v <= 2, "must be from -2 to 2"),
    "frequency_penalty": _Rule(lambda v: -2 <= v <= 2, "must be from -2 to 2"),
    "max_tokens": _Rule(lambda v: v >= 1, "must be at least 1"),
    "min_tokens": _Rule(lambda v: v >= 0, "must be at least 0"),
    "logprobs": _Rule(lambda v: 0 <= v <= 20, "must be from 0 to 20"),
    "n": _Rule(lambda v: 1 <= v <= MAX_CHOICES, f"must be from 1 to {MAX_CHOICES}"),
    "best_of": _Rule(lambda v: 1 <= v <= MAX_CHOICES, f"must be from 1 to {MAX_CHOICES}"),
}


@dataclass(frozen=True, slots=True)
class Room:
    """What the model and the prompt leave: most output tokens possible, and the one taken when the client asks for no number."""

    most: int
    default: int


@dataclass(frozen=True, slots=True)
class Choices:
    """How many are given out, of how many that run, and whether log probabilities are kept only to tell which."""

    n: int
    best_of: int
    logprobs_hidden: bool


def read_choices(params: SamplingParams, field: str, violations: Violations) -> Choices:
    """Their ranges are checked by `read_sampling`."""
    n = params.n if params.HasField("n") else 1
    best_of = params.best_of if params.HasField("best_of") else n
    violations.require(best_of >= n, f"{field}.best_of", f"must be at least n, {n}; got {best_of}")
    return Choices(n, best_of, logprobs_hidden=best_of > n and not params.HasField("logprobs"))


def read_sampling(
    params: SamplingParams, field: str, vocab_size: int, room: Room, draw_seed: Callable[[], int], violations: Violations
) -> Sampling:
    """`params` as the core takes them; what is wrong goes to `violations`, and the answer is then of no use."""
    _check_numbers(params, field, violations)
    _check_stops(params.stop, f"{field}.stop", violations)
    _check_token_ids(params.stop_token_ids, f"{field}.stop_token_ids", vocab_size, violations)
    _check_logit_bias(params, f"{field}.logit_bias", vocab_size, violations)
    max_tokens = params.max_tokens if params.HasField("max_tokens") else room.default
    violations.require(
        max_tokens <= room.most, f"{field}.max_tokens", f"the prompt leaves room for {room.most} tokens; got {max_tokens}"
    )
    if max_tokens >= 1:
        violations.require(params.min_tokens <= max_tokens, f"{field}.min_tokens", f"must be at most max_tokens, {max_tokens}")
    return Sampling(
        max_tokens=max_tokens,
        seed=params.seed if params.HasField("seed") else draw_seed(),
        temperature=params.temperature if params.HasField("temperature") else 1.0,
        top_p=params.top_p if params.HasField("top_p") else 1.0,
        top_k=max(params.top_k, 0),
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty if params.HasField("repetition_penalty") else 1.0,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=tuple(sorted(params.logit_bias.items())),
        min_tokens=params.min_tokens,
        stop_token_ids=tuple(dict.fromkeys(params.stop_token_ids)),
        ignore_eos=params.ignore_eos,
        logprobs=params.logprobs if params.HasField("logprobs") else _logprobs_kept(params),
    )


def _logprobs_kept(params: SamplingParams) -> int | None:
    """Of the sampled tokens alone, where the best choices are to be told by them."""
    return 0 if params.HasField("best_of") and params.best_of > max(params.n, 1) else None


def _check_numbers(params: SamplingParams, field: str, violations: Violations) -> None:
    for name, rule in _RULES.items():
        if params.HasField(name):  # type: ignore[arg-type]  # the stub wants literals
            value = getattr(params, name)
            said = value if isinstance(value, int) else f"{value:g}"
            violations.require(rule.holds(value), f"{field}.{name}", f"{rule.words}; got {said}")


def _check_stops(stops: Sequence[str], field: str, violations: Violations) -> None:
    violations.require(len(stops) <= MAX_STOPS, field, f"must be at most {MAX_STOPS} strings; got {len(stops)}")
    for index, stop in enumerate(stops[:MAX_STOPS]):
        words = f"must have 1 to {MAX_STOP_CHARS} characters; got {len(stop)}"
        violations.require(1 <= len(stop) <= MAX_STOP_CHARS, f"{field}[{index}]", words)


def _check_token_ids(token_ids: Sequence[int], field: str, vocab_size: int, violations: Violations) -> None:
    for index, token_id in enumerate(token_ids):
        if not 0 <= token_id < vocab_size:
            violations.add(f"{field}[{index}]", f"must be from 0 to {vocab_size - 1}; got {token_id}")
            return


def _check_logit_bias(params: SamplingParams, field: str, vocab_size: int, violations: Violations) -> None:
    if len(params.logit_bias) > MAX_BIASED_TOKENS:
        violations.add(field, f"must be of at most {MAX_BIASED_TOKENS} tokens; got {len(params.logit_bias)}")
        return
    for token_id, bias in sorted(params.logit_bias.items()):
        if not 0 <= token_id < vocab_size:
            violations.add(field, f"token ids must be from 0 to {vocab_size - 1}; got {token_id}")
            return
        if not -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS:
            violations.add(field, f"values must be from -100 to 100; got {bias:g} for token {token_id}")
            return
