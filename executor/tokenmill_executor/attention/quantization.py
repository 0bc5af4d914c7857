"""K and V in fewer bits: each token's numbers of one head become codes, and one scale that they are multiplied with on reading.

int8 and int4 round to whole numbers, fp8 to float8_e4m3 (Micikevicius et al., "FP8 Formats for Deep Learning", 2022). int4 has 16
codes, -8 to 7, and two of them in a byte; the number of greatest magnitude becomes -8, whatever its sign, as in GGUF's Q4_0.
A scale that is not a number tells of numbers that were none, which codes cannot.

Must not know: blocks, layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class KvFormat:
    """`dtype` is of codes, `packed` how many of them it holds; `largest` is the code of the number of greatest magnitude.

    None for `largest`: numbers are kept as they are, without scales.
    """

    dtype: torch.dtype
    packed: int = 1
    largest: float | None = None

    def width(self, head_dim: int) -> int:
        """Elements of `dtype` that a head takes."""
        return head_dim // self.packed

    def head_bytes(self, head_dim: int) -> int:
        """Of one token, its scale among them."""
        return self.width(head_dim) * self.dtype.itemsize + (0 if self.largest is None else torch.float32.itemsize)


INT8 = KvFormat(torch.int8, largest=127.0)
INT4 = KvFormat(torch.uint8, packed=2, largest=-8.0)
FP8 = KvFormat(torch.float8_e4m3fn, largest=448.0)
# Heads of nothing larger become zeros: the inverse of a scale has to be finite.
LEAST = 1e-30
_FORMATS = {"int8": INT8, "int4": INT4, "fp8": FP8, "bfloat16": KvFormat(torch.bfloat16)}
KV_CACHE_DTYPES = ("auto", *_FORMATS)


def kv_format(name: str, model_dtype: torch.dtype) -> KvFormat:
    """That of a `kv_cache_dtype`; "auto" is the model's type. Raises KeyError for another name."""
    return KvFormat(model_dtype) if name == "auto" else _FORMATS[name]


def quantize(heads: torch.Tensor, kind: KvFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., head_dim] → codes [..., width] and scales [...] float32. The format has scales."""
    assert kind.largest is not None
    numbers = heads.float()
    high, low = numbers.amax(-1), numbers.amin(-1)
    extreme = torch.where(high >= -low, high, low) if kind is INT4 else torch.maximum(high, -low)
    inverse = torch.where(extreme.abs() > LEAST, kind.largest / extreme, 0.0)
    codes = torch.nan_to_num(numbers * inverse[..., None], nan=0.0)
    if kind is FP8:
        return codes.to(kind.dtype), extreme / kind.largest
    codes = torch.floor(codes + 0.5)
    return (_pack(codes) if kind is INT4 else codes.to(kind.dtype)), extreme / kind.largest


def dequantize(codes: torch.Tensor, scales: torch.Tensor, kind: KvFormat, dtype: torch.dtype) -> torch.Tensor:
    """[..., width] and [...] → [..., head_dim]."""
    numbers = _unpack(codes) if kind is INT4 else codes.float()
    return (numbers * scales[..., None]).to(dtype)


def _pack(codes: torch.Tensor) -> torch.Tensor:
    """The first half of a head lies in the low four bits, the second in the high ones, each plus 8."""
    low, high = (codes.clamp(-8, 7) + 8).to(torch.uint8).chunk(2, dim=-1)
    return low | (high << 4)


def _unpack(packed: torch.Tensor) -> torch.Tensor:
    return torch.cat([packed & 15, packed >> 4], dim=-1).float() - 8
