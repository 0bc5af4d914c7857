"""A runner without a model: tokens from a formula, steps that last as long as a cost model says. Needs no torch.

The formula, so that a client's test can foretell every token: token number `position` of a sequence (prompt tokens count, from 0)
with prompt P and seed s is

    FIRST_TOKEN + crc32(LE64(s) + LE64(position), crc32(LE32(P[0]) + LE32(P[1]) + ...)) mod NUM_TOKENS

where LE32 and LE64 are little-endian bytes. That is a printable ASCII character of the byte-level tokenizer of
`simulated_tokenizer.py`. Temperature and all other sampling parameters do not matter, and no end of sequence comes, unless
`eos_every` asks for it.
"""

from __future__ import annotations

import os
import signal
import struct
import time
import zlib
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np

from tokenmill_executor.interrupt import Interrupt
from tokenmill_executor.runner import (
    ONE_GROUP,
    Batch,
    BlockGroup,
    HostMemory,
    RunnerDescription,
    SampledLogprobs,
    SamplingInput,
    StepOutput,
)
from tokenmill_executor.simulated_tokenizer import EOS_TOKEN_ID, VOCAB_SIZE, tokenizer_files

FIRST_TOKEN = 32
NUM_TOKENS = 95
# As Llama 3 8B in bfloat16: 32 layers of K and V with 8 heads of 128.
_KV_BYTES_PER_TOKEN = 32 * 2 * 8 * 128 * 2
_DEFAULT_KV_BYTES = 4 << 30
_BLOCK_COPY_S = 100e-6


@dataclass(frozen=True, slots=True)
class StepCost:
    """What a step takes: so much each, and so much for each token of prefill and of decode."""

    step_s: float = 0.0
    prefill_token_s: float = 0.0
    decode_token_s: float = 0.0

    def seconds(self, batch: Batch) -> float:
        """A row of one token is a decode; longer ones are prefill."""
        counts = np.diff(batch.query_starts)
        decode = int(np.count_nonzero(counts == 1))
        return self.step_s + self.decode_token_s * decode + self.prefill_token_s * (int(counts.sum()) - decode)


def prompt_digest(prompt: SequenceOf[int]) -> int:
    return zlib.crc32(np.asarray(prompt, dtype="<u4").tobytes())


def simulated_token(digest: int, seed: int, position: int) -> int:
    """The formula of the module's docstring; `digest` is `prompt_digest(prompt)`."""
    return FIRST_TOKEN + zlib.crc32(struct.pack("<QQ", seed, position), digest) % NUM_TOKENS


def _die() -> None:
    """No last words."""
    os.kill(os.getpid(), signal.SIGKILL)


class SimulatedHostMemory:
    """Copies that take as long as 2 MiB blocks do over PCIe 4."""

    def __init__(self, sleep: Callable[[float], None]) -> None:
        self._sleep = sleep
        self._measured = 0

    def copy_out(self, blocks: SequenceOf[int], slots: SequenceOf[int]) -> None:
        self._copy(len(blocks))

    def copy_in(self, slots: SequenceOf[int], blocks: SequenceOf[int]) -> None:
        self._copy(len(blocks))

    def take_measured(self) -> tuple[int, float]:
        count, self._measured = self._measured, 0
        return count, count * _BLOCK_COPY_S

    def _copy(self, count: int) -> None:
        self._sleep(count * _BLOCK_COPY_S)
        self._measured += count


class SimulatedRunner:
    """`eos_every` n ends a sequence with its n-th output token; 0 never does. ignore_eos and min_tokens are heeded.

    A step that computes `poison_token` calls `die`, as a bug in a kernel would end the process.
    """

    def __init__(
        self,
        cost: StepCost = StepCost(),
        max_model_len: int = 8192,
        eos_every: int = 0,
        kv_cache_memory_bytes: int | None = None,
        sleep: Callable[[float], None] = time.sleep,
        poison_token: int | None = None,
        die: Callable[[], None] = _die,
        block_groups: tuple[BlockGroup, ...] = ONE_GROUP,
    ) -> None:
        self.description = RunnerDescription(
            "simulated", VOCAB_SIZE, max_model_len, (EOS_TOKEN_ID,), "simulated", "none", block_groups
        )
        self._cost = cost
        self._eos_every = eos_every
        self._kv_bytes = _DEFAULT_KV_BYTES if kv_cache_memory_bytes is None else kv_cache_memory_bytes
        self._sleep = sleep
        self._poison_token = poison_token
        self._die = die

    def block_bytes(self, block_size: int) -> int:
        """As a model of 8 billion parameters would take; nothing is allocated."""
        return block_size * _KV_BYTES_PER_TOKEN

    def available_bytes(self) -> int:
        return self._kv_bytes

    def allocate(self, num_blocks: int, block_size: int) -> None:
        """There is no cache."""

    def populate_some(self) -> bool:
        return False

    def host_memory(self, num_blocks: int) -> HostMemory:
        return SimulatedHostMemory(self._sleep)

    def step(self, batch: Batch) -> StepOutput:
        started_s = time.perf_counter()
        if self._poison_token is not None and self._poison_token in batch.token_ids:
            self._die()
        token_ids = [self._token(sample) for sample in batch.samples]
        left_s = self._cost.seconds(batch) - (time.perf_counter() - started_s)
        if left_s > 0:
            self._sleep(left_s)
        logprobs = {
            index: _certain(token_ids[index]) for index, sample in enumerate(batch.samples) if sample.params.logprobs is not None
        }
        return StepOutput(token_ids, logprobs, forward_s=time.perf_counter() - started_s)

    def steps(self, batch: Batch, most: int, interrupt: Interrupt) -> list[StepOutput]:
        """One of them: there is nothing to win by more."""
        return [self.step(batch)]

    def tokenizer_files(self) -> dict[str, bytes]:
        return tokenizer_files()

    def _token(self, sample: SamplingInput) -> int:
        if self._eos_every and not sample.params.ignore_eos:
            output = len(sample.token_ids) - sample.num_prompt_tokens
            if output >= sample.params.min_tokens and (output + 1) % self._eos_every == 0:
                return EOS_TOKEN_ID
        if sample.memo is None:
            sample.memo = prompt_digest(sample.token_ids[: sample.num_prompt_tokens])
        assert isinstance(sample.memo, int)
        return simulated_token(sample.memo, sample.params.seed, len(sample.token_ids))


def _certain(token_id: int) -> SampledLogprobs:
    """There was no choice: probability 1, and no other token beside it."""
    return SampledLogprobs(0.0, ((token_id, 0.0),))
