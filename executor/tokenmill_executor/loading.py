"""From settings to a loaded engine and the description of what it offers.

Must not know: gRPC servers, streams. Runs on the engine's thread, for seconds or minutes. Torch is imported only for a real model.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version

import structlog
from tokenmill.executor.v1 import executor_pb2 as pb
from tokenmill_service.flags import SettingsError

from tokenmill_executor.engine import Engine
from tokenmill_executor.prefix import PrefixHasher, hash_function
from tokenmill_executor.runner import BlockGroup, Runner
from tokenmill_executor.servicer import Offer, tokenizer_digest
from tokenmill_executor.settings import SIMULATED, Settings
from tokenmill_executor.simulated import SimulatedRunner, StepCost

log = structlog.get_logger(__name__)


def load_runner(settings: Settings) -> Runner:
    """Raises SettingsError for a model or a choice that cannot be had."""
    if settings.model == SIMULATED:
        return _simulated_runner(settings)
    # Both this import and the call, which imports torch, find out what is not installed.
    try:
        from tokenmill_executor.model import load_runner as load_model

        return load_model(
            settings.model,
            dtype=settings.dtype,
            device=settings.device,
            max_model_len=settings.max_model_len,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            kv_cache_memory_bytes=settings.kv_cache_memory_bytes,
            gpu_memory_utilization=settings.gpu_memory_utilization,
            threads=settings.threads,
            block_size=settings.block_size,
            quantization=settings.quantization,
            kv_cache_dtype=settings.kv_cache_dtype,
            attention_backend=settings.attention_backend,
            sliding_window=settings.sliding_window,
            attention_sinks=settings.attention_sinks,
            enforce_eager=settings.enforce_eager,
        )
    except ModuleNotFoundError as error:
        raise SettingsError(f"{error.name} is missing, which a real model needs: pip install 'tokenmill[executor]'") from error
    except (ValueError, OSError) as error:
        raise SettingsError(f"--model {settings.model} cannot be loaded: {error}") from error


def _simulated_runner(settings: Settings) -> Runner:
    cost = settings.simulated
    return SimulatedRunner(
        StepCost(cost.step_ms / 1e3, cost.prefill_token_us / 1e6, cost.decode_token_us / 1e6),
        max_model_len=settings.max_model_len or 8192,
        block_groups=(BlockGroup(settings.sliding_window, settings.attention_sinks),),
        eos_every=cost.eos_every,
        poison_token=cost.poison_token,
        kv_cache_memory_bytes=settings.kv_cache_memory_bytes,
    )


def count_blocks(settings: Settings, runner: Runner) -> int:
    """As many as the memory holds, but no more than a full step of sequences of the greatest length can use."""
    if settings.num_gpu_blocks_override is not None:
        return settings.num_gpu_blocks_override
    try:
        available, block_bytes = runner.available_bytes(), runner.block_bytes(settings.block_size)
    except MemoryError as error:
        raise SettingsError(
            f"the largest step has no room beside the weights: lower --max-num-batched-tokens or --max-num-seqs: {error}"
        ) from error
    fitting = available // block_bytes
    if fitting < 1:
        raise SettingsError(
            f"the memory for the KV cache, {available} bytes, holds no block of {block_bytes} bytes: "
            "raise --kv-cache-memory-bytes or --gpu-memory-utilization"
        )
    return min(fitting, settings.max_num_seqs * _blocks_per_sequence(settings, runner))


def _blocks_per_sequence(settings: Settings, runner: Runner) -> int:
    """Of the greatest length, with as many tokens on their way as plans can have."""
    length, on_the_way = runner.description.max_model_len, settings.pipeline_depth * settings.max_num_batched_tokens
    return sum(group.most_blocks(length, on_the_way, settings.block_size) for group in runner.description.block_groups)


def make_hasher(settings: Settings, runner: Runner) -> PrefixHasher | None:
    """None when prefixes are not to be cached. Raises SettingsError."""
    if not settings.enable_prefix_caching:
        return None
    if any(group.sliding_window is not None for group in runner.description.block_groups):
        log.info("prefix caching unused", reason="layers with a sliding window give up the blocks that a prefix would be found in")
        return None
    try:
        digest = hash_function(settings.prefix_caching_hash_algo)
    except ModuleNotFoundError as error:
        raise SettingsError("--prefix-caching-hash-algo xxhash needs the package xxhash: pip install xxhash") from error
    description = runner.description
    # The cache dies with the process, and so do the weights: their names are enough to tell them apart.
    return PrefixHasher(digest, f"{description.model} {description.dtype} {settings.kv_cache_dtype}", settings.block_size)


def count_host_blocks(settings: Settings, runner: Runner, hasher: PrefixHasher | None) -> int:
    """Evicted blocks that host memory is to hold. Raises SettingsError."""
    size_bytes = int(settings.kv_offloading_size * (1 << 30))
    if size_bytes == 0:
        return 0
    if hasher is None:
        raise SettingsError(
            "--kv-offloading-size keeps blocks of the prefix cache, and no prefix is cached: --no-enable-prefix-caching, or a "
            "model with sliding windows"
        )
    block_bytes = runner.block_bytes(settings.block_size)
    if size_bytes < block_bytes:
        raise SettingsError(f"--kv-offloading-size {settings.kv_offloading_size:g} GiB holds no block of {block_bytes} bytes")
    return size_bytes // block_bytes


class Loader:
    """Two steps, since the first runs on the engine's thread and the second needs the bound address: `load`, then `offer`."""

    def __init__(self, settings: Settings, make_runner: Callable[[Settings], Runner] = load_runner) -> None:
        self._settings = settings
        self._make_runner = make_runner
        self._runner: Runner | None = None
        self._num_blocks = 0
        self._num_host_blocks = 0
        self._hasher: PrefixHasher | None = None

    def load(self) -> Engine:
        runner = self._runner = self._make_runner(self._settings)
        self._num_blocks = count_blocks(self._settings, runner)
        if self._num_blocks < _blocks_per_sequence(self._settings, runner):
            log.warning(
                "KV cache small",
                num_blocks=self._num_blocks,
                blocks_of_the_longest=_blocks_per_sequence(self._settings, runner),
                max_model_len=runner.description.max_model_len,
                advice="longer sequences will fail: raise --kv-cache-memory-bytes or lower --max-model-len",
            )
        self._hasher = make_hasher(self._settings, runner)
        self._num_host_blocks = count_host_blocks(self._settings, runner, self._hasher)
        try:
            return Engine(
                runner,
                self._num_blocks,
                self._settings.block_size,
                self._settings.max_num_seqs,
                hasher=self._hasher,
                num_host_blocks=self._num_host_blocks,
            )
        except MemoryError as error:
            raise SettingsError(
                f"lower --gpu-memory-utilization, --kv-cache-memory-bytes or --kv-offloading-size: {error}"
            ) from error

    def offer(self, name: str) -> Offer:
        assert self._runner is not None
        settings, description = self._settings, self._runner.description
        files = self._runner.tokenizer_files()
        response = pb.DescribeResponse(
            name=name,
            model=settings.served_model_name or description.model,
            tokenizer_digest=tokenizer_digest(files),
            vocab_size=description.vocab_size,
            max_model_len=description.max_model_len,
            block_size=settings.block_size,
            num_blocks=self._num_blocks,
            num_host_blocks=self._num_host_blocks,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            eos_token_ids=description.eos_token_ids,
            pipeline_depth=settings.pipeline_depth,
            device=description.device,
            dtype=description.dtype,
            version=version("tokenmill"),
            block_groups=[
                pb.BlockGroup(sliding_window=group.sliding_window or 0, sinks=group.sinks) for group in description.block_groups
            ],
        )
        response.features.append("multi_step")
        if settings.kv_cache_dtype != "auto":
            response.features.append(f"kv_cache_dtype={settings.kv_cache_dtype}")
        if self._hasher is not None:
            response.features.append("prefix_caching")
            response.prefix_caching_hash_algo = settings.prefix_caching_hash_algo
            response.cache_version = self._hasher.version
        return Offer(response, files)
