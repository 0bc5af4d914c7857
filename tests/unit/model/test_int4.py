"""Weights in 4 bits: as ggml stores them, and quantised here."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from gguf.quants import quantize as ggml_quantize
from tokenmill_executor.model.gguf_file import GgufFile
from tokenmill_executor.model.int4 import GROUP, Int4Rows, from_q4_0, from_q4_1, quantize

from tests.fakes.models import smollm2_path


def random_weight(seed: int = 0) -> torch.Tensor:
    return torch.randn((5, 4 * GROUP), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("kind", "read"), [(GGMLQuantizationType.Q4_0, from_q4_0), (GGMLQuantizationType.Q4_1, from_q4_1)], ids=["Q4_0", "Q4_1"]
)
def test_ggml_blocks_are_read_as_ggml_reads_them(kind: GGMLQuantizationType, read: object) -> None:
    blocks = ggml_quantize(random_weight().numpy(), kind)
    rows = read(torch.from_numpy(blocks.view(np.uint8)))  # type: ignore[operator]
    assert isinstance(rows, Int4Rows)
    assert torch.equal(rows.dequantize(), torch.from_numpy(dequantize(blocks, kind)))


def test_quantising_errs_by_half_a_step_at_most() -> None:
    weight = random_weight(1)
    weight[2, :GROUP] = 0
    weight[3, :GROUP] = 7
    rows = quantize(weight)
    assert int(rows.codes.max()) == 15
    # Half a step, and what half precision makes of the scale and of the minimum.
    bound = rows.scales.float() * 0.51 + rows.minima.float().abs() * 2**-10
    assert torch.all((rows.dequantize() - weight).abs().view(5, -1, GROUP).amax(2) <= bound)
    assert not rows.dequantize()[2, :GROUP].any()


def test_a_gguf_file_gives_its_codes_as_they_are() -> None:
    """Q and K among them, whose rows are put into another order; what has more bits has no codes of 4."""
    tensors = GgufFile(smollm2_path()).tensors()
    for name in ("self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj"):
        rows = tensors.int4(f"model.layers.3.{name}.weight")
        assert rows is not None
        assert torch.equal(rows[:].dequantize(), tensors[f"model.layers.3.{name}.weight"])
    assert tensors.int4("model.embed_tokens.weight") is None
