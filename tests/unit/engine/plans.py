"""Short ways to write plans in tests."""

from __future__ import annotations

from collections.abc import Sequence

from tokenmill_executor.engine import Engine
from tokenmill_executor.prefix import PrefixHasher, hash_function
from tokenmill_executor.records import Admission, Plan, Result
from tokenmill_executor.runner import SamplingParams

from tests.fakes.runner import oracle_token


def hasher(block_size: int, version: str = "oracle 1") -> PrefixHasher:
    return PrefixHasher(hash_function("sha256"), version, block_size)


def admission(
    sequence_id: int, prompt: Sequence[int], output: Sequence[int] = (), max_tokens: int = 8, salt: str = "", **params: object
) -> Admission:
    sampling = SamplingParams(max_tokens=max_tokens, seed=0, **params)  # type: ignore[arg-type]
    return Admission(sequence_id, [*prompt, *output], len(prompt), sampling, salt)


def oracle_output(prompt: Sequence[int], count: int) -> list[int]:
    """The first `count` output tokens of a sequence with this prompt."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(oracle_token(tokens))
    return tokens[len(prompt) :]


class Driver:
    """Numbers the plans it gives to an engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.plan_id = 0

    def plan(self, advance: dict[int, int], admit: Sequence[Admission] = (), release: Sequence[int] = ()) -> Result:
        self.plan_id += 1
        result = self.engine.carry_out(Plan(7, self.plan_id, release, admit, list(advance), list(advance.values())))
        assert (result.epoch, result.plan_id, list(result.sequence_ids)) == (7, self.plan_id, list(advance))
        self.engine.check()
        return result
