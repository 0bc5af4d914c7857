"""Whether the C++ backend can run on this machine, and run a given model. The answers are sentences for one log line.

Must not know: weights.
"""

from __future__ import annotations

from tokenmill_executor.cpu import library
from tokenmill_executor.cpu.library import GROUP_SIZE, MAX_GROUP_HEADS, MAX_HEAD_DIM
from tokenmill_executor.model.config import ModelConfig

QUANTIZATIONS = (None, "int8", "int4")
KV_CACHE_DTYPES = ("auto", "bfloat16", "int8")


def available() -> str | None:
    """None if the kernels run here, else why not."""
    instruction_set = library.best_instruction_set(library.processor_flags())
    if instruction_set is None:
        return "the processor has neither AVX512 with BF16 and VNNI nor AVX2"
    try:
        library.load(instruction_set)
    except (OSError, AttributeError) as error:  # none, or old ones that lack a function
        return f"the kernels are not built (python -m tokenmill_executor.cpu.build builds them): {error}"
    return None


def supports(
    config: ModelConfig,
    *,
    block_size: int = library.BLOCK_SIZE,
    quantization: str | None = None,
    kv_cache_dtype: str = "auto",
) -> str | None:
    """None if the kernels can run the model so, else why not."""
    if kv_cache_dtype not in KV_CACHE_DTYPES:
        return f"they have no {kv_cache_dtype} KV cache"
    if block_size != library.BLOCK_SIZE:
        return f"the kernels are made for blocks of {library.BLOCK_SIZE} positions, not {block_size}"
    if config.sandwich_norms or config.norm_offset or config.local_rope or config.activation != "silu":
        return f"they have not the norms, rotations and activation of {config.architecture}"
    if config.attention_scale is not None or config.embedding_scale != 1:
        return f"they scale neither scores nor embeddings as {config.architecture} does"
    if config.head_dim % 16 or config.head_dim > MAX_HEAD_DIM:
        return f"a head size of {config.head_dim} is not a multiple of 16 up to {MAX_HEAD_DIM}"
    if config.num_heads // config.num_kv_heads > MAX_GROUP_HEADS:
        return f"more than {MAX_GROUP_HEADS} query heads share a key-value head"
    depths = (config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim)
    step = 2 if quantization is None else GROUP_SIZE
    if any(depth % step for depth in depths):
        return f"hidden, intermediate and attention sizes {depths} are not all multiples of {step}"
    return None
