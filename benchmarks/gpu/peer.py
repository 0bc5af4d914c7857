"""transformers' own continuous batching on a model of the same shape and the same requests:

    python -m benchmarks.gpu.peer DEVICE [--tiny]

Runs in a process of its own, so that it has the device's memory and can be given up on. Prints the version and output tokens a
second.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import torch
import transformers

from benchmarks.gpu.shapes import FULL, SMOKE, Scale


def main() -> None:
    device, scale = torch.device(sys.argv[1]), SMOKE if "--tiny" in sys.argv else FULL
    torch.set_default_dtype(scale.dtypes[-1])
    # Untyped: not all that is used here has types, and releases differ in it.
    library: Any = transformers
    with device:
        model = library.AutoModelForCausalLM.from_config(library.LlamaConfig(**_shape(scale)), attn_implementation="sdpa").eval()
    settings = library.GenerationConfig(max_new_tokens=scale.output, do_sample=False, eos_token_id=-1, pad_token_id=0)
    # By itself it takes most of the memory, and fills it, which on a CPU takes long.
    sizes = None if scale is FULL else library.ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64)

    def generate(prompts: list[list[int]]) -> int:
        # The manager is kept, so that what it prepares once is not counted.
        outputs = model.generate_batch(
            inputs=prompts, generation_config=settings, continuous_batching_config=sizes, persistent_manager=True
        )
        tokens = sum(len(output.generated_tokens) for output in outputs.values())
        # It only logs what fails.
        assert tokens == len(prompts) * scale.output, f"{tokens} tokens of {len(outputs)} requests"
        return tokens

    warm_up, measured = rounds(scale)
    generate(warm_up)
    started_s = time.perf_counter()
    tokens = generate(measured)
    print(transformers.__version__, tokens / (time.perf_counter() - started_s), flush=True)
    os._exit(0)  # whatever threads the manager still has


def rounds(scale: Scale) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts to warm up with, and the engine's own, to measure.

    None begins as another: the manager keeps its prefix cache, and what it finds there it need not compute.
    """
    return _prompts(scale, scale.requests), _prompts(scale, 0)


def _prompts(scale: Scale, first: int) -> list[list[int]]:
    vocab_size = scale.config.vocab_size
    return [
        [(index * 31 + place * 7) % (vocab_size - 10) + 5 for place in range(scale.context)]
        for index in range(first, first + scale.requests)
    ]


def _shape(scale: Scale) -> dict[str, int]:
    config = scale.config
    return {
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
    }


if __name__ == "__main__":
    main()
