"""What fewer bits of weights and of the KV cache cost in quality on real text, against float32 with an unquantised cache.

    python -m benchmarks.cpu_quality [--model PATH] [--tokens 320]

The text is the start of chapters of Python's language reference, which ships with Python (`pydoc_data.topics`). Each token is a
sequence of its own over the shared blocks of its passage, so that every position has logits. KL is the mean over positions of the
divergence from float32's distribution, in nats; the logit error is the norm of the differences over that of float32's logits, each
row less its mean, which no probability depends on; agreement is how often the likeliest token is float32's. Each type of the KV
cache runs with float32 weights on the torch path, so that it alone makes the difference; so do the products of quantised weights as
on CUDA, which are the same on any device but for rounding. Writes its table to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenmill_executor.cpu.library import BLOCK_SIZE
from tokenmill_executor.cpu.model import CpuModel
from tokenmill_executor.model.decoder import Decoder
from tokenmill_executor.model.port import Model
from tokenmill_executor.model.quantized_linear import QUANTIZED_LINEARS
from tokenmill_executor.model.tokenizer_files import TOKENIZER, tokenizer_files
from tokenmill_executor.model.weights import Checkpoint, load_checkpoint

from benchmarks.tables import keep, today
from tests.fakes.models import smollm2_path
from tests.unit.cpu.small_models import make_batch

PASSAGES = ("execmodel", "objects", "exceptions", "customization")
WAYS: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "bfloat16, KV int8": {"kv_cache_dtype": "int8"},
    "int8": {"quantization": "int8"},
    "int8, KV int8": {"quantization": "int8", "kv_cache_dtype": "int8"},
    "int4": {"quantization": "int4"},
}
CACHES = ("bfloat16", "int8", "fp8", "int4")


@dataclass(slots=True)
class Score:
    """Sums over positions."""

    positions: int = 0
    loss: float = 0.0
    divergence: float = 0.0
    agreed: int = 0
    error: float = 0.0
    size: float = 0.0

    def add(self, logits: torch.Tensor, exact: torch.Tensor, tokens: list[int]) -> None:
        found, truth = logits[:-1].log_softmax(-1), exact[:-1].log_softmax(-1)
        self.positions += len(found)
        self.loss -= float(found.gather(1, torch.tensor(tokens[1:])[:, None]).sum())
        self.divergence += float((truth.exp() * (truth - found)).sum())
        self.agreed += int((found.argmax(-1) == truth.argmax(-1)).sum())
        wanted = exact - exact.mean(-1, keepdim=True)
        self.error += float((logits - logits.mean(-1, keepdim=True) - wanted).square().sum())
        self.size += float(wanted.square().sum())

    def row(self, name: str) -> str:
        perplexity = float(torch.tensor(self.loss / self.positions).exp())
        divergence, error, agreed = self.divergence / self.positions, (self.error / self.size) ** 0.5, self.agreed / self.positions
        return f"| {name} | {perplexity:.2f} | {divergence:.4f} | {error:.2%} | {agreed:.1%} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=None, help="without it, SmolLM2-135M-Instruct")
    parser.add_argument("--tokens", type=int, default=320, help="of each passage")
    arguments = parser.parse_args()
    checkpoint = load_checkpoint(arguments.model or smollm2_path())
    tokenizer = Tokenizer.from_str(tokenizer_files(checkpoint.source)[TOKENIZER].decode())
    passages = [tokenizer.encode(topics[name]).ids[: arguments.tokens] for name in PASSAGES]
    table = _table(checkpoint, _scores(checkpoint, passages, arguments.tokens))
    keep("cpu-quality", table)


@torch.inference_mode()
def _scores(checkpoint: Checkpoint, passages: list[list[int]], length: int) -> dict[str, Score]:
    config, tensors = checkpoint.config, checkpoint.tensors
    exact_way = partial(Decoder, config, tensors, torch.float32, torch.device("cpu"), length)
    makers: dict[str, Callable[[], Model]] = {
        "float32": exact_way,
        **{f"float32, KV {name}": partial(exact_way, kv_cache_dtype=name) for name in CACHES},
        **{f"float32, products as on CUDA in {name}": partial(exact_way, linear=made) for name, made in QUANTIZED_LINEARS.items()},
        **{name: partial(CpuModel, config, tensors, max_model_len=length, **settings) for name, settings in WAYS.items()},
    }
    exact: list[torch.Tensor] = []
    scores = {}
    for name, make in makers.items():
        logits = _all_logits(make(), passages)
        exact = exact or logits
        scores[name] = Score()
        for passage, found, truth in zip(passages, logits, exact, strict=True):
            scores[name].add(found, truth, passage)
    return scores


def _all_logits(model: Model, passages: list[list[int]]) -> list[torch.Tensor]:
    """[tokens, vocab_size] of each passage."""
    blocks = -(-max(map(len, passages)) // BLOCK_SIZE)
    model.allocate(blocks, BLOCK_SIZE)
    table = list(range(blocks))
    batches = [make_batch([(passage[: end + 1], 1, table) for end in range(len(passage))]) for passage in passages]
    return [model.forward(batch).clone() for batch in batches]


def _table(checkpoint: Checkpoint, scores: dict[str, Score]) -> str:
    positions = next(iter(scores.values())).positions
    return "\n".join(
        (
            f"# Quality on the CPU, {today()}",
            "",
            f"`python -m benchmarks.cpu_quality`, {checkpoint.name}, {positions} positions of English, Python "
            f"{platform.python_version()}, torch {torch.__version__}. Read perplexities that differ by less than 1 % as equal. "
            "What float32 computes with is what the file says: of one whose weights have 4 bits, int4 takes them as they are.",
            "",
            "| | perplexity | KL from float32 | logit error | greedy agreement |",
            "|---|---|---|---|---|",
            *(score.row(name) for name, score in scores.items()),
            "",
        )
    )


if __name__ == "__main__":
    main()
