"""A Llama-family decoder on the C++ kernels: owns the paged KV cache, runs a step as one call.

Must not know: sampling, sequences beyond the flat batch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from tokenmill_executor.attention.layout import cache_layout
from tokenmill_executor.cpu import library
from tokenmill_executor.cpu.library import BLOCK_SIZE, KV_KINDS
from tokenmill_executor.cpu.memory import HugeArena, padded_bytes
from tokenmill_executor.cpu.support import KV_CACHE_DTYPES, QUANTIZATIONS, supports
from tokenmill_executor.cpu.weights import WeightPacker
from tokenmill_executor.model.config import ModelConfig
from tokenmill_executor.model.rope import rotary_tables
from tokenmill_executor.runner import Batch, BlockGroup


class CpuModel:
    """Weights are read from `tensors` a few rows at a time and packed as bfloat16, or with `quantization` as int8 or int4
    (norms stay as they are, and int4 leaves the head int8). Embeddings are bfloat16, or where the head has them, its rows.

    Raises ValueError for what the kernels do not support, OSError where they cannot be loaded.
    """

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, torch.Tensor],
        *,
        max_model_len: int,
        quantization: str | None = None,
        kv_cache_dtype: str = "auto",
        threads: int | None = None,
        instruction_set: str | None = None,
    ) -> None:
        _check(config, quantization, kv_cache_dtype)
        self.config = config
        self._layout = cache_layout(config.windows, config.sinks)
        best = instruction_set or library.best_instruction_set(library.processor_flags())
        if best is None:
            raise ValueError("the processor has no instruction set that the kernels are built for")
        self.instruction_set = best
        self._library = library.load(best)
        self._kv_kind = "bfloat16" if kv_cache_dtype == "auto" else kv_cache_dtype
        self._kept: list[torch.Tensor] = []
        self._layers = (library.Layer * config.num_layers)()
        self._packer = WeightPacker(config, tensors, quantization or "bfloat16", self._library.tm_panel_columns(), self._kept)
        threads = threads or torch.get_num_threads()
        with _one_torch_thread():
            self._record = self._load(max_model_len, threads)
        del self._packer
        self._cache: HugeArena | None = None
        self._storage: list[torch.Tensor] = []
        self._workspace = HugeArena(0)
        self._workspace_bytes = 0
        self._logits = self._most_logits = torch.empty((0, config.vocab_size))

    @property
    def block_groups(self) -> tuple[BlockGroup, ...]:
        """Of layers that share KV blocks."""
        return self._layout.groups

    def block_bytes(self, block_size: int) -> int:
        """K and V of a group's layers for one block."""
        self._check_block_size(block_size)
        return 2 * self._layout.layers_per_group * self._layer_block_bytes()

    def allocate(self, num_blocks: int, block_size: int) -> None:
        """Makes the KV cache, dropping an earlier one."""
        self._check_block_size(block_size)
        self._cache, self._storage = None, []
        size = num_blocks * self._layer_block_bytes()
        places = self._layout.layers_per_group
        self._cache = HugeArena(2 * places * padded_bytes((size,), torch.uint8))
        # K and V of each place of a group side by side, as a layer reads them.
        self._storage = [self._cache.take((size,), torch.uint8) for _ in range(2 * places)]
        for layer, (group, place) in zip(self._layers, self._layout.places, strict=True):
            layer.group = group
            layer.k_cache, layer.v_cache = (cache.data_ptr() for cache in self._storage[2 * place : 2 * place + 2])
        self._record.num_blocks = num_blocks

    def storage(self) -> list[torch.Tensor]:
        """The KV cache, [num_blocks, bytes] each."""
        return [cache.view(self._record.num_blocks, -1) for cache in self._storage]

    def forward(self, batch: Batch) -> torch.Tensor:
        """One step. → logits of the rows that sample, [len(sample_rows), vocab_size] float32, good until the next step.

        Raises ValueError, and leaves the cache as it was, for a batch with an index outside its array.
        """
        record = self._checked(batch, 0)
        logits = self.room_for_logits(record.samples)
        self._library.tm_step(self._record, record, self._workspace_pointer, logits.data_ptr())
        return logits

    def decode(self, batch: Batch, decodes: library.Decodes, logits: torch.Tensor, sampling_room: int) -> int:
        """Up to `decodes.most` steps of a batch of decodes that all sample, one of what the other sampled. → how many.

        `logits` are `room_for_logits`, where the rows of `decodes` point to. Raises as `forward`.
        """
        record = self._checked(batch, decodes.most - 1)
        if not record.tokens == record.sequences == record.samples:
            raise ValueError("a batch of decodes has one token of each sequence, and all sample")
        taken = self._library.tm_decode(self._record, record, decodes, self._workspace_pointer, logits.data_ptr(), sampling_room)
        return int(taken)

    def room_for_logits(self, samples: int) -> torch.Tensor:
        """The same memory each time: pages that are new to the process cost a step of many sequences a thirtieth of its time.

        And the same tensor: while torch makes one it lets go of the interpreter, which the event loop's thread then takes.
        """
        if samples > self._most_logits.shape[0]:
            self._most_logits = torch.empty((2 * samples, self.config.vocab_size), dtype=torch.float32)
            self._logits = self._most_logits
        if samples != self._logits.shape[0]:
            self._logits = self._most_logits.narrow(0, 0, samples)
        return self._logits

    def _checked(self, batch: Batch, ahead: int) -> library.BatchRecord:
        """The batch as the kernels read it, right for so many steps more, and the memory that these take."""
        record = library.batch_record(batch)
        if self._cache is None:
            raise RuntimeError("allocate has to be called before the first step")
        wrong = self._library.tm_check(self._record, record, ahead)
        if wrong:
            raise ValueError(wrong.decode())
        self._reserve(self._library.tm_workspace_bytes(self._record, record, ahead))
        return record

    def _reserve(self, size_bytes: int) -> None:
        if size_bytes > self._workspace_bytes:
            self._workspace_bytes = 2 * size_bytes
            self._workspace = HugeArena(self._workspace_bytes)
            self._workspace_pointer = self._workspace.take((self._workspace_bytes,), torch.uint8).data_ptr()

    def _layer_block_bytes(self) -> int:
        head_bytes = self._library.tm_kv_head_bytes(KV_KINDS[self._kv_kind], self.config.head_dim)
        return int(self.config.num_kv_heads * head_bytes)

    @staticmethod
    def _check_block_size(block_size: int) -> None:
        if block_size != BLOCK_SIZE:
            raise ValueError(f"the kernels are made for blocks of {BLOCK_SIZE} positions, not {block_size}")

    def _load(self, max_model_len: int, threads: int) -> library.Model:
        config, packer = self.config, self._packer
        for index, layer in enumerate(self._layers):
            packer.fill_layer(layer, index)
        cos, sin = (packer.keep(table.contiguous()) for table in rotary_tables(config, max_model_len))
        return library.Model(
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            vocab=config.vocab_size,
            num_layers=config.num_layers,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            max_positions=max_model_len,
            num_blocks=0,
            kv_kind=KV_KINDS[self._kv_kind],
            sinks=config.sinks,
            threads=threads,
            norm_eps=config.rms_norm_eps,
            attention_scale=config.head_dim**-0.5,
            embeddings=None if config.tie_word_embeddings else packer.embeddings(),
            cos=cos,
            sin=sin,
            final_norm=packer.vector("model.norm.weight"),
            layers=ctypes.cast(self._layers, ctypes.POINTER(library.Layer)),
            head=packer.head(),
        )


@contextmanager
def _one_torch_thread() -> Iterator[None]:
    """For many small operations: torch's threads wait for each other at each, on busy cores far longer than the work takes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _check(config: ModelConfig, quantization: str | None, kv_cache_dtype: str) -> None:
    if quantization not in QUANTIZATIONS or kv_cache_dtype not in KV_CACHE_DTYPES:
        raise ValueError(f"no kernels for quantization {quantization} with a {kv_cache_dtype} cache")
    reason = supports(config, quantization=quantization)
    if reason is not None:
        raise ValueError(reason)
