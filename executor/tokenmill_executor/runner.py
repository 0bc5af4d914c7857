"""The port between the engine, which owns blocks and sequences, and what computes a step: a torch model, or the simulated one.

Must not know: gRPC, protobuf, plans, epochs. Arrays are numpy, so that the simulated runner needs no torch.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tokenmill_executor.interrupt import Interrupt

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class BlockGroup:
    """Layers that share blocks: a block holds K and V of `block_size` positions for the layers of one group.

    A query of these layers sees `sliding_window` positions, its own among them, and the first `sinks` ones; None: all before it.
    """

    sliding_window: int | None = None
    sinks: int = 0

    def first_needed(self, computed: int, block_size: int) -> int:
        """The first block, behind those of the sinks, that a query at position `computed` or later can see."""
        return 0 if self.sliding_window is None else max(0, computed - self.sliding_window + 1) // block_size

    def sink_blocks(self, block_size: int) -> int:
        return -(-self.sinks // block_size)

    def most_blocks(self, num_tokens: int, step_tokens: int, block_size: int) -> int:
        """Most blocks a sequence ever holds on its way to `num_tokens`, computed by at most `step_tokens` at once."""
        whole = -(-num_tokens // block_size)
        if self.sliding_window is None:
            return whole
        # As many as an interval of so many positions can touch.
        positions = self.sliding_window - 1 + step_tokens
        return min(whole, (positions + block_size - 2) // block_size + 1 + self.sink_blocks(block_size))


ONE_GROUP = (BlockGroup(),)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one sequence are chosen; meanings and defaults as in `tokenmill.executor.v1.Sampling`."""

    max_tokens: int
    seed: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None


@dataclass(slots=True)
class SamplingInput:
    """One sequence that samples in this step. `token_ids` are all its known tokens, the first `num_prompt_tokens` its prompt.

    The token sampled now gets index `len(token_ids)` in the sequence: the position that keys its random numbers. The same object
    comes at every step of one admission, its `token_ids` grown; `memo` is the runner's own, to keep what it derives from it.
    `ends` are the tokens that end the sequence.
    """

    sequence_id: int
    token_ids: SequenceOf[int]
    num_prompt_tokens: int
    params: SamplingParams
    ends: frozenset[int] = frozenset()
    memo: object = None


@dataclass(slots=True)
class Batch:
    """One step over a flat batch of S sequences and T tokens: prefill chunks and decodes mixed, in plan order.

    G is the number of block groups, 1 for most models.

    - token_ids, positions: [T], position counted from 0 in its sequence.
    - slots: [G, T], where the K and V of each token go in each group: block * block_size + offset in the block.
    - query_starts: [S + 1], sequence s owns tokens query_starts[s] to query_starts[s + 1] - 1.
    - context_lens: [S], tokens of each sequence that are in the cache after this step (its last position + 1).
    - block_tables: [G, S, B], block of each run of block_size positions; entries beyond a sequence's context (for `Runner.steps`,
      that of the last step) are 0, and so are those that a group's window has left behind.
    - sample_rows: indices into S of those that reach the end of their known tokens and sample, in order; `samples` describes them.
    """

    token_ids: Int32Array
    positions: Int32Array
    slots: Int32Array
    query_starts: Int32Array
    context_lens: Int32Array
    block_tables: Int32Array
    sample_rows: Int32Array
    samples: list[SamplingInput] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class SampledLogprobs:
    """`top` has (token id, log probability) pairs, most likely first.

    Of the distribution before temperature and truncation, after penalties and bias.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(slots=True)
class StepOutput:
    """token_ids[i] is what `samples[i]` sampled. `logprobs` is keyed by index into `samples`.

    `errors`, keyed alike, says why a sequence's logits cannot be sampled (not a number); its token means nothing.
    """

    token_ids: list[int]
    logprobs: dict[int, SampledLogprobs] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    forward_s: float = 0.0
    sample_s: float = 0.0


class DeviceLost(Exception):
    """The device is beyond use: no step can succeed in this process any more, whatever its batch."""


class HostMemory(Protocol):
    """Slots of host memory for blocks of the KV cache. Used by the thread that makes the steps.

    Copies and steps take effect in the order they are asked for, though a copy may go on while the host does something else.
    """

    def copy_out(self, blocks: SequenceOf[int], slots: SequenceOf[int]) -> None:
        """From blocks of the cache to slots, all distinct. Raises DeviceLost, as `Runner.step` does."""

    def copy_in(self, slots: SequenceOf[int], blocks: SequenceOf[int]) -> None:
        """From slots to blocks of the cache, all distinct. Raises DeviceLost."""

    def take_measured(self) -> tuple[int, float]:
        """Blocks whose copies are over since the last time, and the seconds these took."""


@dataclass(frozen=True, slots=True)
class RunnerDescription:
    model: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    device: str
    dtype: str
    block_groups: tuple[BlockGroup, ...] = ONE_GROUP


class Runner(Protocol):
    """Computes steps. Used by one thread."""

    description: RunnerDescription

    def block_bytes(self, block_size: int) -> int:
        """Bytes of K and V of a group's layers for one block."""

    def available_bytes(self) -> int:
        """Memory for the KV cache as the settings ask. Raises MemoryError where not even steps have room, or DeviceLost."""

    def allocate(self, num_blocks: int, block_size: int) -> None:
        """Makes the KV cache. Called once, before the first step. Raises MemoryError, or DeviceLost."""

    def populate_some(self) -> bool:
        """Has the system give a little more of the memory that the cache is to use; false once it has all, or nothing is won by it.

        May be called at any time after `allocate`, and takes some ms at most: for when there is nothing else to do.
        """

    def host_memory(self, num_blocks: int) -> HostMemory:
        """Makes so many slots beside the KV cache. Called at most once, after `allocate`. Raises MemoryError."""

    def step(self, batch: Batch) -> StepOutput:
        """One forward pass and its sampling.

        Raises DeviceLost, after which nothing else is called. Else raises what torch raises: this batch's slots then hold nothing
        of use, those of earlier steps are as they were, and the engine calls again with parts of the batch to find the sequence at
        fault.
        """

    def steps(self, batch: Batch, most: int, interrupt: Interrupt) -> list[StepOutput]:
        """As `step`, and then up to `most` steps in all, each of the tokens that the one before has sampled; raises alike.

        With `most` above 1 all of the batch are decodes that sample, and block tables reach to the last position of all steps.
        Fewer steps are always allowed, and none begins once it is known that a sequence has ended by one of its `ends`, that one
        cannot be sampled, or that `interrupt` is asked. Of a sequence that is over, what later steps tell means nothing.
        """

    def tokenizer_files(self) -> dict[str, bytes]:
        """`tokenizer.json`, and `tokenizer_config.json` with the chat template if there is one."""
