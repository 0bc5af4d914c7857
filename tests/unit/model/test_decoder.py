"""The decoder against transformers, on small random models: whole prompts, chunks, decodes and their mixtures in one batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenmill_executor.model.decoder import Decoder
from tokenmill_executor.model.linear import LinearMaker, make_linear
from tokenmill_executor.model.quantized_linear import QUANTIZED_LINEARS
from tokenmill_executor.model.weights import load_checkpoint

from tests.fakes.batches import Blocks, Track
from tests.fakes.models import greedy_tokens, random_model

BLOCK_SIZE = 4
NUM_BLOCKS = 256
LONG = {"rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 32}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-no-groups": ("llama", {"num_key_value_heads": 6}),
    "llama-one-kv-head": ("llama", {"num_key_value_heads": 1}),
    "llama-head-80": ("llama", {"head_dim": 80}),
    "llama-head-96": ("llama", {"head_dim": 96}),
    "llama-head-128": ("llama", {"head_dim": 128}),
    "llama-linear": ("llama", {"rope_parameters": {**LONG, "rope_type": "linear"}}),
    "llama-llama3": (
        "llama",
        {"rope_parameters": {**LONG, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}},
    ),
    "llama-yarn": ("llama", {"rope_parameters": {**LONG, "rope_type": "yarn"}}),
    "llama-yarn-mscale": (
        "llama",
        {
            "rope_parameters": {
                **LONG,
                "rope_type": "yarn",
                "mscale": 0.7,
                "mscale_all_dim": 1.3,
                "beta_fast": 16.0,
                "truncate": False,
            }
        },
    ),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": 7}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-window-from-layer-1": ("qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
    "gemma3": ("gemma3_text", {"sliding_window": 7, "num_hidden_layers": 7, "query_pre_attn_scalar": 40}),
    "gemma3-kinds-and-ropes": (
        "gemma3_text",
        {
            "sliding_window": 5,
            "num_hidden_layers": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {**LONG, "rope_type": "linear", "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
            },
        },
    ),
    "qwen3": ("qwen3", {}),
    "qwen3-window": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 9, "layer_types": ["full_attention", *["sliding_attention"] * 2]},
    ),
    "qwen3-biases-tied": ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
}


class Served:
    """A transformers model, and the same read back from disk by ours."""

    def __init__(
        self,
        folder: Path,
        family: str,
        changes: dict[str, Any],
        dtype: torch.dtype = torch.float32,
        linear: LinearMaker = make_linear,
    ) -> None:
        self.oracle = random_model(family, **changes)
        self.oracle.save_pretrained(folder, max_shard_size="300KB")
        checkpoint = load_checkpoint(folder)
        device = torch.device("cpu")
        limit = checkpoint.config.max_model_len
        self.decoder = Decoder(checkpoint.config, checkpoint.tensors, dtype, device, limit, linear=linear)
        self.decoder.allocate(NUM_BLOCKS, BLOCK_SIZE)
        self.blocks = Blocks(NUM_BLOCKS, BLOCK_SIZE, groups=len(self.decoder.block_groups))

    def logits(self, *advances: tuple[Track, int]) -> torch.Tensor:
        with torch.inference_mode():
            return self.decoder.forward(self.blocks.batch(advances))

    def expected(self, *tracks: Track) -> torch.Tensor:
        """Logits after the last known token of each."""
        with torch.inference_mode():
            return torch.stack([self.oracle(torch.tensor([track.tokens])).logits[0, -1] for track in tracks])


@pytest.fixture(params=FAMILIES)
def served(request: pytest.FixtureRequest, tmp_path: Path) -> Served:
    return Served(tmp_path, *FAMILIES[request.param])


def prompt(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 211, (length,), generator=generator).tolist()


def test_prefill_chunks_and_decodes_in_one_batch_give_the_logits_of_transformers(served: Served) -> None:
    """Three sequences at different stages in every step; one samples nothing while it is in mid-prompt."""
    long, short, late = (served.blocks.track(prompt(length, length)) for length in (45, 9, 21))
    torch.testing.assert_close(served.logits((long, 20), (short, 9)), served.expected(short), rtol=1e-4, atol=1e-4)
    short.tokens.append(7)
    torch.testing.assert_close(served.logits((short, 1), (long, 11)), served.expected(short), rtol=1e-4, atol=1e-4)
    short.tokens.append(19)
    got = served.logits((late, 21), (long, 14), (short, 1))
    torch.testing.assert_close(got, served.expected(late, long, short), rtol=1e-4, atol=1e-4)
    for track, token in ((late, 11), (long, 12), (short, 13)):
        track.tokens.append(token)
    got = served.logits((long, 1), (short, 1), (late, 1))
    torch.testing.assert_close(got, served.expected(long, short, late), rtol=1e-4, atol=1e-4)


def test_greedy_tokens_equal_those_of_transformers(served: Served) -> None:
    tracks = [served.blocks.track(prompt(length, 3 * length)) for length in (5, 33, 17)]
    expected = [greedy_tokens(served.oracle, list(track.tokens), 24) for track in tracks]
    prompts = [len(track.tokens) for track in tracks]
    served.logits(*((track, length - 1) for track, length in zip(tracks, prompts, strict=True)))
    for _ in range(24):
        for track, token in zip(tracks, served.logits(*((track, 1) for track in tracks)).argmax(-1).tolist(), strict=True):
            track.tokens.append(token)
    assert [track.tokens[length:] for track, length in zip(tracks, prompts, strict=True)] == expected


def test_dynamic_rope_grows_with_the_sequence_as_in_transformers(tmp_path: Path) -> None:
    """Token by token beyond the trained length, where transformers too gives each token the frequencies of its own length."""
    rope = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 3.0}
    served = Served(tmp_path, "llama", {"rope_parameters": rope, "max_position_embeddings": 32})
    track = served.blocks.track(prompt(30, 1))
    expected = greedy_tokens(served.oracle, list(track.tokens), 30)
    served.logits((track, 29))
    for _ in range(30):
        track.tokens.append(int(served.logits((track, 1)).argmax()))
    assert served.decoder.config.max_model_len == 96
    assert track.tokens[30:] == expected


def test_bfloat16_is_near_float32(tmp_path: Path) -> None:
    served = Served(tmp_path, "qwen3", {}, torch.bfloat16)
    track = served.blocks.track(prompt(40, 5))
    served.logits((track, 25))
    got, expected = served.logits((track, 15)), served.expected(track)
    assert got.dtype == torch.float32
    assert torch.nn.functional.cosine_similarity(got, expected).item() > 0.998


@pytest.mark.parametrize(("kind", "nearness"), [("fp8", 0.85), ("int8", 0.99)])
def test_quantised_weights_are_near_float32(kind: str, nearness: float, tmp_path: Path) -> None:
    served = Served(tmp_path, "qwen2", {}, torch.bfloat16, QUANTIZED_LINEARS[kind])
    track = served.blocks.track(prompt(40, 5))
    served.logits((track, 25))
    got, expected = served.logits((track, 15)), served.expected(track)
    assert torch.nn.functional.cosine_similarity(got, expected).item() > nearness


def test_blocks_of_a_finished_sequence_serve_the_next(tmp_path: Path) -> None:
    """What an earlier sequence left in its blocks is not seen."""
    served = Served(tmp_path, "llama", {})
    first = served.blocks.track(prompt(60, 1))
    served.logits((first, 60))
    served.blocks.free(first)
    second = served.blocks.track(prompt(6, 2))
    torch.testing.assert_close(served.logits((second, 6)), served.expected(second), rtol=1e-4, atol=1e-4)


def test_no_sampling_row_gives_no_logits(tmp_path: Path) -> None:
    served = Served(tmp_path, "llama", {})
    assert served.logits((served.blocks.track(prompt(9, 1)), 4)).shape == (0, 211)
