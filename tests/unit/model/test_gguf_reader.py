"""The reader of GGUF headers beside the `gguf` library's own, and what it says of files that are damaged."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.quants import quantize
from tokenmill_executor.model.gguf_reader import GgufReader


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with metadata of all kinds, and tensors plain and quantised."""
    path = tmp_path / "all.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_string("text", "größer ▁ \n")
    writer.add_bool("yes", True)
    for kind in ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"):
        getattr(writer, f"add_{kind}")(kind, 100)
    writer.add_int32("negative", -3)
    writer.add_float32("float32", 0.1)
    writer.add_float64("float64", 0.1)
    writer.add_array("strings", ["a", "", "Ġb"])
    writer.add_array("integers", [1, -2, 3])
    writer.add_array("flags", [True, False])
    rows = np.random.default_rng(0).standard_normal((6, 64), np.float32)
    writer.add_tensor("float32", rows)
    writer.add_tensor("float16", rows[:5].astype(np.float16))
    writer.add_tensor("one_row", rows[0])
    for quantized in (gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.Q8_0):
        writer.add_tensor(quantized.name, quantize(rows, quantized), raw_dtype=quantized)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_reads_what_the_library_reads(path: Path) -> None:
    theirs, ours = gguf.GGUFReader(path), GgufReader(path)
    assert ours.fields == {name: field.contents() for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        stored = ours.tensors[tensor.name]
        assert stored.type == tensor.tensor_type
        assert list(stored.shape) == tensor.shape.tolist()[::-1]
        assert stored.data.dtype == tensor.data.dtype
        assert np.array_equal(stored.data, tensor.data)


def test_a_file_cut_anywhere_is_refused(path: Path, tmp_path: Path) -> None:
    whole, cut = path.read_bytes(), tmp_path / "cut.gguf"
    last = len(whole.rstrip(b"\0"))
    for size in [*range(0, 1200, 7), last - 100, last - 1]:
        cut.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"cut short|begin with GGUF|empty"):
            GgufReader(cut)


@pytest.mark.parametrize(
    ("at", "value", "sentence"),
    [(0, b"GGML", "begin with GGUF"), (4, b"\0\0\0\3", "byte order"), (4, b"\1\0\0\0", "version"), (16, b"\xff" * 8, "cut short")],
)
def test_a_wrong_header_is_said_in_a_sentence(path: Path, at: int, value: bytes, sentence: str) -> None:
    content = bytearray(path.read_bytes())
    content[at : at + len(value)] = value
    path.write_bytes(content)
    with pytest.raises(ValueError, match=sentence):
        GgufReader(path)
