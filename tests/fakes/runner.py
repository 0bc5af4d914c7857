"""A runner that remembers what was written to which slot, and answers from that: a crossed slot or token shows.

Its token is a function of the context as read back through the block table, so the test's own arithmetic over a sequence's tokens
(`oracle_token`) can foretell it without sharing any code with the engine.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from tokenmill_executor.interrupt import Interrupt
from tokenmill_executor.runner import (
    ONE_GROUP,
    Batch,
    BlockGroup,
    DeviceLost,
    RunnerDescription,
    SampledLogprobs,
    StepOutput,
)

VOCAB_SIZE = 1000
EOS = 0
# A context with this token makes the runner raise, or find logits that are not numbers.
POISON = 998
NOT_A_NUMBER = 999


def oracle_token(context: Sequence[int]) -> int:
    """The token after `context`: never EOS, never one of the two bad tokens."""
    return 1 + zlib.crc32(np.asarray(context, dtype=np.int64).tobytes()) % 900


def _ended(batch: Batch, output: StepOutput) -> bool:
    return any(token in sample.ends for sample, token in zip(batch.samples, output.token_ids, strict=True))


@dataclass
class OracleHostMemory:
    """Holds what the slots of copied blocks held. `measured` is what the next look at the copies' times gives."""

    num_slots: int
    block_size: int
    cache: dict[int, tuple[int, int, int]]
    measured: tuple[int, float] = (0, 0.0)
    held: dict[int, list[tuple[int, int, int]]] = field(default_factory=dict)

    def copy_out(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        assert len(set(slots)) == len(slots) == len(set(blocks)) == len(blocks)
        assert all(0 <= slot < self.num_slots for slot in slots)
        for block, slot in zip(blocks, slots, strict=True):
            self.held[slot] = [self.cache[place] for place in self._places(block)]

    def copy_in(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        assert len(set(slots)) == len(slots) == len(set(blocks)) == len(blocks)
        for block, slot in zip(blocks, slots, strict=True):
            self.cache.update(zip(self._places(block), self.held[slot], strict=True))

    def take_measured(self) -> tuple[int, float]:
        measured, self.measured = self.measured, (0, 0.0)
        return measured

    def _places(self, block: int) -> range:
        return range(block * self.block_size, (block + 1) * self.block_size)


@dataclass
class OracleRunner:
    """`script` gives a sequence's output tokens by index instead of the oracle. `gate`, if set, holds each step till it is open.

    Each group of `groups` has its own K and V of every token; of one with a window, what is seen is read and no more. Asked for
    several steps it takes at most `steps_at_once`, and hears of an end, an error or an interrupt by so many steps too `late`.
    """

    max_model_len: int = 64
    script: Mapping[int, Sequence[int]] = field(default_factory=dict)
    broken: bool = False
    lost: bool = False
    num_steps: int = 0
    gate: threading.Event | None = None
    stepping: threading.Event = field(default_factory=threading.Event)
    groups: tuple[BlockGroup, ...] = ONE_GROUP
    steps_at_once: int = 1
    late: int = 0
    on_step: Callable[[int], None] = lambda _: None

    def __post_init__(self) -> None:
        self.description = RunnerDescription("oracle", VOCAB_SIZE, self.max_model_len, (EOS,), "cpu", "float32", self.groups)
        self._cache: dict[int, tuple[int, int, int]] = {}
        self._block_size = 0
        self._num_slots = 0
        self.host: OracleHostMemory | None = None

    def block_bytes(self, block_size: int) -> int:
        return block_size * 100

    def available_bytes(self) -> int:
        return 100_000

    def allocate(self, num_blocks: int, block_size: int) -> None:
        self._block_size, self._num_slots = block_size, num_blocks * block_size

    def populate_some(self) -> bool:
        return False

    def host_memory(self, num_blocks: int) -> OracleHostMemory:
        self.host = OracleHostMemory(num_blocks, self._block_size, self._cache)
        return self.host

    def tokenizer_files(self) -> dict[str, bytes]:
        return {"tokenizer.json": b"{}" * 600_000, "tokenizer_config.json": b"{}"}

    def steps(self, batch: Batch, most: int, interrupt: Interrupt) -> list[StepOutput]:
        outputs: list[StepOutput] = []
        left = min(most, self.steps_at_once)
        while left:
            outputs.append(self._step(batch, most))
            over = outputs[-1].errors or interrupt.is_asked() or _ended(batch, outputs[-1])
            left = min(left - 1, self.late) if over else left - 1
            if left:
                batch = self._next(batch, outputs[-1].token_ids)
        return outputs

    def step(self, batch: Batch) -> StepOutput:
        return self._step(batch, 1)

    def _next(self, batch: Batch, sampled: list[int]) -> Batch:
        positions = batch.positions + np.int32(1)
        blocks = np.take_along_axis(batch.block_tables, (positions // self._block_size)[None, :, None], axis=2)[..., 0]
        samples = [
            replace(sample, token_ids=[*sample.token_ids, token]) for sample, token in zip(batch.samples, sampled, strict=True)
        ]
        return replace(
            batch,
            token_ids=np.array(sampled, dtype=np.int32),
            positions=positions,
            slots=(blocks * self._block_size + positions % self._block_size).astype(np.int32),
            context_lens=batch.context_lens + np.int32(1),
            samples=samples,
        )

    def _step(self, batch: Batch, most: int) -> StepOutput:
        self.num_steps += 1
        self.stepping.set()
        self.on_step(self.num_steps)
        if self.gate is not None:
            assert self.gate.wait(60)
        if self.lost:
            raise DeviceLost("it fell off the bus")
        if self.broken:
            raise RuntimeError("the device is gone")
        self._write(batch)
        seen = [self._read(batch, row, most) for row in range(len(batch.context_lens))]
        if any(POISON in tokens.values() for tokens in seen):
            raise RuntimeError("poisoned input")
        output = StepOutput([], forward_s=0.001, sample_s=0.0005)
        for index, (row, sample) in enumerate(zip(batch.sample_rows.tolist(), batch.samples, strict=True)):
            context = list(sample.token_ids)
            assert seen[row] == {place: context[place] for place in seen[row]}, (
                "the cache holds another context than the sequence's"
            )
            scripted = self.script.get(sample.sequence_id)
            token = oracle_token(context) if scripted is None else scripted[len(context) - sample.num_prompt_tokens]
            output.token_ids.append(token)
            if NOT_A_NUMBER in context:
                output.errors[index] = "logits are not numbers"
            if sample.params.logprobs is not None:
                output.logprobs[index] = SampledLogprobs(
                    -float(token), tuple((token, -float(token)) for _ in range(sample.params.logprobs))
                )
        return output

    def _write(self, batch: Batch) -> None:
        slots = batch.slots.ravel().tolist()
        assert len(set(slots)) == len(slots), "two tokens of a step share a slot"
        assert all(0 <= slot < self._num_slots for slot in slots)
        for array in (batch.token_ids, batch.positions, batch.slots, batch.query_starts, batch.context_lens, batch.block_tables):
            assert array.dtype == np.int32
        for group, group_slots in enumerate(batch.slots.tolist()):
            for slot, token, position in zip(group_slots, batch.token_ids.tolist(), batch.positions.tolist(), strict=True):
                self._cache[slot] = (group, token, position)

    def _read(self, batch: Batch, row: int, most: int) -> dict[int, int]:
        """The tokens that the queries of a row see, by position; the row's table may reach to the last of `most` steps."""
        seen = {}
        length = int(batch.context_lens[row])
        first = length - int(batch.query_starts[row + 1] - batch.query_starts[row])
        for number, group in enumerate(self.groups):
            table = batch.block_tables[number, row].tolist()
            assert not any(table[-(-(length + most - 1) // self._block_size) :]), "entries beyond the context are not 0"
            for position in range(length):
                if group.sliding_window is not None and group.sinks <= position <= first - group.sliding_window:
                    continue
                slot = table[position // self._block_size] * self._block_size + position % self._block_size
                owner, seen[position], written = self._cache[slot]
                assert (owner, written) == (number, position), "a slot holds another position, or another group's"
        return seen
