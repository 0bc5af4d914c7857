"""transformers' own continuous batching on a model of the same shape and the same requests: python -m benchmarks.gpu.peer.

Runs in a process of its own, so that it has the device's memory and can be given up on. Prints output tokens a second.
"""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import transformers

from benchmarks.gpu.shapes import FULL, LLAMA_8B


def main() -> None:
    torch.set_default_dtype(torch.bfloat16)
    # Untyped: not all that is used here has types, and releases differ in it.
    library: Any = transformers
    with torch.device("cuda"):
        model = library.AutoModelForCausalLM.from_config(library.LlamaConfig(**_shape()), attn_implementation="sdpa").eval()
    settings = library.GenerationConfig(max_new_tokens=FULL.output, do_sample=False, eos_token_id=-1, pad_token_id=0)
    prompts = [_prompt(index) for index in range(FULL.requests)]
    # The manager is kept, so that what it prepares once is not counted.
    model.generate_batch(inputs=prompts, generation_config=settings, persistent_manager=True)
    torch.cuda.synchronize()
    started_s = time.perf_counter()
    outputs = model.generate_batch(inputs=prompts, generation_config=settings, persistent_manager=True)
    taken_s = time.perf_counter() - started_s
    print(sum(len(output.generated_tokens) for output in outputs.values()) / taken_s, flush=True)
    os._exit(0)  # whatever threads the manager still has


def _prompt(index: int) -> list[int]:
    return [(index * 31 + place * 7) % (LLAMA_8B.vocab_size - 10) + 5 for place in range(FULL.context)]


def _shape() -> dict[str, int]:
    return {
        "hidden_size": LLAMA_8B.hidden_size,
        "num_hidden_layers": LLAMA_8B.num_layers,
        "num_attention_heads": LLAMA_8B.num_heads,
        "num_key_value_heads": LLAMA_8B.num_kv_heads,
        "head_dim": LLAMA_8B.head_dim,
        "intermediate_size": LLAMA_8B.intermediate_size,
        "vocab_size": LLAMA_8B.vocab_size,
        "max_position_embeddings": LLAMA_8B.max_position_embeddings,
    }


if __name__ == "__main__":
    main()
