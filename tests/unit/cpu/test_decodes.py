"""Several decode steps in one call of the kernels: the same tokens as step by step, and an end where there is something to tell."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from tokenmill_executor.attention.layout import cache_layout
from tokenmill_executor.cpu import library
from tokenmill_executor.cpu.decodes import CpuDecodes
from tokenmill_executor.cpu.model import CpuModel
from tokenmill_executor.interrupt import Interrupt
from tokenmill_executor.model.config import ModelConfig
from tokenmill_executor.runner import Batch, SamplingInput, SamplingParams
from tokenmill_executor.sampling import NOT_A_NUMBER, Sampler, SamplingKernels

from tests.unit.cpu.small_models import (
    BLOCKS_PER_GROUP,
    cpu_model,
    make_batch,
    needs_kernels,
    random_tensors,
    random_tokens,
    runnable_sets,
    scattered_tables,
    small_config,
)

pytestmark = needs_kernels

# Contexts after the first step: in mid-block, at its end and its beginning, and one that grows into a second split.
LENGTHS = (3, 16, 33, 509)
STEPS = 20
MOST_KNOWN = 200  # of the vocabulary, in the contexts: of a step's tokens some are new
PARAMS = (
    SamplingParams(99, seed=1, temperature=0.0),
    SamplingParams(99, seed=2, temperature=1.3),
    SamplingParams(99, seed=3, temperature=0.9, top_p=0.8, min_p=0.01),
    SamplingParams(99, seed=-4, temperature=0.7, top_k=7),
)


@dataclass
class Bench:
    """A small model and four sequences whose contexts, but for the last token, are in its cache."""

    config: ModelConfig
    model: CpuModel
    tokens: list[list[int]]
    tables: list[list[int]]
    kernels: SamplingKernels
    ends: frozenset[int] = frozenset()

    @property
    def groups(self) -> int:
        return len(cache_layout(self.config.windows).groups)

    def compute_prompts(self) -> None:
        prompts = [(known[:-1], len(known) - 1, table) for known, table in zip(self.tokens, self.tables, strict=True)]
        self.model.forward(make_batch(prompts, self.groups))

    def batch(self) -> Batch:
        batch = make_batch([(tokens, 1, table) for tokens, table in zip(self.tokens, self.tables, strict=True)], self.groups)
        whole = np.array([np.array(self.tables) + group * BLOCKS_PER_GROUP for group in range(self.groups)], dtype=np.int32)
        samples = [SamplingInput(row, self.tokens[row], 1, PARAMS[row], self.ends) for row in range(len(LENGTHS))]
        return replace(batch, block_tables=whole, samples=samples)

    def one_by_one(self, steps: int) -> list[list[int]]:
        """The tokens of each step, and leaves all as it was; but for the cache, where later steps write the same."""
        sampler, found = Sampler((0,), self.kernels), []
        lengths = [len(tokens) for tokens in self.tokens]
        for _ in range(steps):
            batch = self.batch()
            found.append(sampler.sample(self.model.forward(batch), batch.samples).token_ids)
            for tokens, token in zip(self.tokens, found[-1], strict=True):
                tokens.append(token)
        for tokens, length in zip(self.tokens, lengths, strict=True):
            del tokens[length:]
        return found


def _bench(instruction_set: str | None = None, options: Mapping[str, str] = {}, **changes: object) -> Bench:
    config = small_config(**changes)
    model = cpu_model(config, random_tensors(config), instruction_set=instruction_set, **options)
    tables = scattered_tables(len(LENGTHS), max(LENGTHS) + STEPS, 5)
    tokens = [[token % MOST_KNOWN for token in random_tokens(config, length, 40 + row)] for row, length in enumerate(LENGTHS)]
    bench = Bench(config, model, tokens, tables, SamplingKernels(2, instruction_set))
    bench.compute_prompts()
    return bench


@pytest.mark.parametrize("instruction_set", runnable_sets)
@pytest.mark.parametrize(
    ("options", "windows"),
    [({}, None), ({"quantization": "int8", "kv_cache_dtype": "int8"}, None), ({}, (24, None))],
    ids=["bfloat16", "int8", "a window in one group of blocks"],
)
def test_tokens_are_those_of_single_steps(
    instruction_set: str, options: dict[str, str], windows: tuple[int | None, int | None] | None
) -> None:
    bench = _bench(instruction_set, options, windows=windows)
    expected = bench.one_by_one(STEPS)
    assert len({token for step in expected for token in step}) > STEPS, "what is drawn has to vary"
    begin_s = time.perf_counter()
    outputs = CpuDecodes(bench.model, bench.kernels).steps(bench.batch(), STEPS, Interrupt())
    elapsed_s = time.perf_counter() - begin_s
    assert [output.token_ids for output in outputs] == expected
    assert all(not output.errors and output.forward_s > 0 and output.sample_s > 0 for output in outputs)
    assert sum(output.forward_s + output.sample_s for output in outputs) <= elapsed_s, "each has its own share of the time"


def test_it_ends_with_the_step_that_ends_a_sequence() -> None:
    bench = _bench()
    expected = bench.one_by_one(STEPS)
    bench.ends = frozenset({expected[4][2], -1})
    outputs = CpuDecodes(bench.model, bench.kernels).steps(bench.batch(), STEPS, Interrupt())
    last = next(step for step, tokens in enumerate(expected) if bench.ends & set(tokens))
    assert 0 < last <= 4
    assert [output.token_ids for output in outputs] == expected[: last + 1]


def test_it_ends_with_the_step_in_which_it_is_asked_to_and_not_for_a_question_that_is_answered() -> None:
    bench, interrupt = _bench(), Interrupt()
    decodes = CpuDecodes(bench.model, bench.kernels)
    interrupt.ask()
    interrupt.heed()
    assert len(decodes.steps(bench.batch(), 3, interrupt)) == 3
    interrupt.ask()
    assert len(decodes.steps(bench.batch(), 3, interrupt)) == 1


def test_logits_that_are_no_numbers_end_it_and_name_their_row() -> None:
    bench = _bench()
    expected = bench.one_by_one(STEPS)
    known = {token for tokens in bench.tokens for token in tokens}
    step, row = next((step, row) for step, tokens in enumerate(expected) for row in range(4) if tokens[row] not in known)
    tensors = random_tensors(bench.config)
    tensors["model.embed_tokens.weight"][expected[step][row]] = torch.nan
    poisoned = replace(bench, model=cpu_model(bench.config, tensors))
    poisoned.compute_prompts()
    outputs = CpuDecodes(poisoned.model, poisoned.kernels).steps(poisoned.batch(), STEPS, Interrupt())
    assert [output.token_ids for output in outputs[:-1]] == expected[: step + 1]
    assert [output.errors for output in outputs] == [{}] * (step + 1) + [{row: NOT_A_NUMBER}]
    assert [token for other, token in enumerate(outputs[-1].token_ids) if other != row] == [
        token for other, token in enumerate(expected[step + 1]) if other != row
    ]


def test_what_would_reach_beyond_the_table_or_the_longest_context_in_a_later_step_is_refused() -> None:
    bench = _bench()
    decodes, batch = CpuDecodes(bench.model, bench.kernels), bench.batch()
    narrow = replace(batch, block_tables=batch.block_tables[:, :, :32])
    assert len(decodes.steps(narrow, 4, Interrupt())) == 4
    with pytest.raises(ValueError, match="block table"):
        decodes.steps(narrow, 5, Interrupt())
    bench.model._record.max_positions = 512
    assert len(decodes.steps(batch, 4, Interrupt())) == 4
    with pytest.raises(ValueError, match="longest context"):
        decodes.steps(batch, 5, Interrupt())


def test_the_memory_asked_for_is_enough_for_the_last_of_the_steps() -> None:
    """In which a context has grown into a second split."""
    bench = _bench()

    def needed(ahead: int) -> int:
        return int(bench.model._library.tm_workspace_bytes(bench.model._record, library.batch_record(bench.batch()), ahead))

    at_first, asked_for = needed(0), needed(STEPS - 1)
    for tokens in bench.tokens:
        tokens += [0] * (STEPS - 1)
    assert at_first < needed(0) <= asked_for


def test_chunks_are_refused() -> None:
    bench = _bench()
    chunk = make_batch([(bench.tokens[1], 2, bench.tables[1])], bench.groups)
    chunk.samples = [SamplingInput(0, bench.tokens[1], 1, PARAMS[0])]
    with pytest.raises(ValueError, match="decodes"):
        CpuDecodes(bench.model, bench.kernels).steps(chunk, 2, Interrupt())
