"""How long one forward pass of the torch decoder takes, by batch and type: milliseconds a step, least and median of several.

    python -m benchmarks.forward MODEL [--device cpu] [--threads 2] [--repeats 7]

MODEL is a Hugging Face directory or a GGUF file. On a machine with other work, trust the least.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator

import torch
from tokenmill_executor.model.decoder import Decoder
from tokenmill_executor.model.weights import Checkpoint, load_checkpoint
from tokenmill_executor.runner import Batch

from tests.fakes.batches import Blocks

BLOCK_SIZE = 16
NUM_BLOCKS = 1408
# Sequences, tokens in the cache before, tokens of each in the step.
STEPS = ((1, 128, 1), (8, 128, 1), (32, 128, 1), (32, 512, 1), (1, 512, 512))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    checkpoint, device = load_checkpoint(arguments.model), torch.device(arguments.device)
    print(f"{'type':10} {'sequences':>9} {'context':>8} {'tokens':>7} {'least ms':>9} {'median ms':>10}")
    for dtype in (torch.float32, torch.bfloat16):
        for (sequences, context, tokens), times in measure(checkpoint, dtype, device, arguments.repeats):
            name = str(dtype).removeprefix("torch.")
            least, median = 1e3 * min(times), 1e3 * statistics.median(times)
            print(f"{name:10} {sequences:9} {context:8} {sequences * tokens:7} {least:9.1f} {median:10.1f}", flush=True)


def measure(
    checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, repeats: int
) -> Iterator[tuple[tuple[int, int, int], list[float]]]:
    """Each of STEPS, and the seconds of its repetitions."""
    decoder = Decoder(checkpoint.config, checkpoint.tensors, dtype, device, max_model_len=2048)
    decoder.allocate(NUM_BLOCKS, BLOCK_SIZE)
    for step in STEPS:
        batch = make_batch(*step)
        run(decoder, batch, device)  # the first makes buffers and picks kernels
        yield step, [run(decoder, batch, device) for _ in range(repeats)]


def make_batch(sequences: int, context: int, tokens: int) -> Batch:
    blocks = Blocks(NUM_BLOCKS, BLOCK_SIZE)
    tracks = [blocks.track([5] * (context + tokens)) for _ in range(sequences)]
    for track in tracks:
        track.computed = context
    return blocks.batch([(track, tokens) for track in tracks])


@torch.inference_mode()
def run(decoder: Decoder, batch: Batch, device: torch.device) -> float:
    started_s = time.perf_counter()
    decoder.forward(batch)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started_s


if __name__ == "__main__":
    main()
