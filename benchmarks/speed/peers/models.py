"""The benchmark's model in the forms that peers read, made from its GGUF file: the same weights, rounded as each form rounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import torch
import transformers
from tokenmill_executor.model.gguf_file import GgufFile
from tokenmill_executor.model.gguf_tokenizer import build_tokenizer

from tests.fakes.models import smollm2_path, transformers_smollm2

_FILE_TYPES = {
    "F16": gguf.LlamaFileType.MOSTLY_F16,
    "BF16": gguf.LlamaFileType.MOSTLY_BF16,
    "Q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
}
_REPLACED = {"general.architecture", "general.file_type"}


def hugging_face(folder: Path) -> Path:
    """A folder of bfloat16 safetensors with config and tokenizer."""
    target = folder / "smollm2-hugging-face"
    if not (target / "tokenizer.json").exists():
        model, _ = transformers_smollm2(smollm2_path())
        model.to(torch.bfloat16).save_pretrained(target)
        tokenizer, config = build_tokenizer(GgufFile(smollm2_path()))
        library: Any = transformers
        fast = library.PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, bos_token=config["bos_token"], eos_token=config["eos_token"]
        )
        fast.save_pretrained(target)
    return target


def requantized(folder: Path, kind: str) -> Path:
    """A GGUF file whose matrices are `F16`, `BF16` or `Q8_0`."""
    target = folder / f"smollm2-{kind}.gguf"
    if target.exists():
        return target
    source = gguf.GGUFReader(smollm2_path())
    part = target.with_suffix(".part")
    writer = gguf.GGUFWriter(part, source.fields["general.architecture"].contents())
    writer.add_file_type(_FILE_TYPES[kind])
    for key, value in source.fields.items():
        if not key.startswith("GGUF.") and key not in _REPLACED:
            item = value.types[-1] if value.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(key, value.contents(), value.types[0], sub_type=item)
    for tensor in source.tensors:
        form = gguf.GGMLQuantizationType[kind if len(tensor.shape) > 1 else "F32"]
        plain = gguf.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, gguf.quantize(plain, form), raw_dtype=form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return part.rename(target)
