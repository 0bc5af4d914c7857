"""The header of a GGUF file, and its tensors as they are stored, over one memory map.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The `gguf` library has a reader too, which makes several arrays
of each string: it takes seconds where this takes a tenth, on the hundred thousand strings of a tokenizer.
Must not know: what a key or a tensor means.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
_PLAIN = {
    GGMLQuantizationType.F16: "<f2",
    GGMLQuantizationType.F32: "<f4",
    GGMLQuantizationType.F64: "<f8",
    GGMLQuantizationType.I8: "<i1",
    GGMLQuantizationType.I16: "<i2",
    GGMLQuantizationType.I32: "<i4",
    GGMLQuantizationType.I64: "<i8",
}
_COUNT = struct.Struct("<Q")
_WORD = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """`shape` is [out, in], the reverse of the file's order; `data` is read-only: numbers of that shape, or the bytes of each row's
    quantised blocks."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    data: np.ndarray[Any, np.dtype[Any]]


class GgufReader:
    """`fields` are metadata as Python's own values, arrays as lists; `tensors` are mapped.

    Raises ValueError for what is no whole GGUF file, OSError.
    """

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._at = 0
        try:
            self._read()
        except (struct.error, KeyError) as error:
            raise ValueError(f"it is cut short or damaged near byte {self._at}") from error

    def release(self) -> None:
        """What has been read of the file no longer counts as this process's memory; it is mapped again when it is looked at."""
        self._bytes.madvise(mmap.MADV_DONTNEED)

    def _read(self) -> None:
        if self._bytes[:4] != _MAGIC:
            raise ValueError("it does not begin with GGUF")
        self._at = 4
        version = self._unpack(_WORD)
        if version not in _VERSIONS:
            raise ValueError(f"its version or byte order is not supported ({version:#x}; versions 2 and 3, little-endian, are)")
        num_tensors, num_fields = self._unpack(_COUNT), self._unpack(_COUNT)
        self.fields: dict[str, Any] = {}
        for _ in range(num_fields):
            name = self._string()
            self.fields[name] = self._value(self._unpack(_WORD))
        described = [self._tensor_header() for _ in range(num_tensors)]
        alignment = int(self.fields.get("general.alignment", GGUF_DEFAULT_ALIGNMENT))
        if alignment < 1:
            raise ValueError(f"its alignment is {alignment}")
        start = -(-self._at // alignment) * alignment
        self.tensors = {name: self._tensor(name, shape, kind, start + offset) for name, shape, kind, offset in described}

    def _unpack(self, form: struct.Struct) -> int:
        (value,) = form.unpack_from(self._bytes, self._at)
        self._at += form.size
        return int(value)

    def _string(self) -> str:
        size = self._unpack(_COUNT)
        text = self._bytes[self._at : self._at + size]
        if len(text) != size:
            raise struct.error
        self._at += size
        return str(text, "utf-8", "replace")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._numbers(kind, 1)[0]
        element, count = self._unpack(_WORD), self._unpack(_COUNT)
        if element in (_STRING, _ARRAY):
            return [self._value(element) for _ in range(count)]
        return self._numbers(element, count)

    def _numbers(self, kind: int, count: int) -> list[Any]:
        numbers = self._array(_SCALARS[kind], count, self._at)
        self._at += numbers.nbytes
        values: list[Any] = numbers.tolist()
        return values

    def _tensor_header(self) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        name = self._string()
        dimensions = [self._unpack(_COUNT) for _ in range(self._unpack(_WORD))]
        return name, tuple(reversed(dimensions)), GGMLQuantizationType(self._unpack(_WORD)), self._unpack(_COUNT)

    def _tensor(self, name: str, shape: tuple[int, ...], kind: GGMLQuantizationType, offset: int) -> StoredTensor:
        values, size_bytes = GGML_QUANT_SIZES[kind]
        *outer, inner = shape
        stored = shape if kind in _PLAIN else (*outer, inner // values * size_bytes)
        count = int(np.prod(stored, dtype=object))
        return StoredTensor(name, shape, kind, self._array(_PLAIN.get(kind, "<u1"), count, offset).reshape(stored))

    def _array(self, element: str, count: int, offset: int) -> np.ndarray[Any, np.dtype[Any]]:
        if offset + count * np.dtype(element).itemsize > len(self._bytes):
            raise struct.error
        return np.frombuffer(self._bytes, element, count, offset)
