"""The products of attention over an int8 cache by themselves: a step rounds them to bfloat16, which hides what they lose."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from tokenmill_executor.cpu.build import INSTRUCTION_SETS, SOURCES

from tests.unit.cpu.small_models import runnable_sets

PROGRAM = Path(__file__).with_name("digits_test.cpp")


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("instruction_set", runnable_sets)
def test_an_int8_caches_products_have_15_bits(tmp_path: Path, instruction_set: str) -> None:
    """With 8 bits the errors are 3e-3."""
    program = tmp_path / "digits_test"
    flags = ["-std=c++20", "-O2", *INSTRUCTION_SETS[instruction_set], f"-I{SOURCES}"]
    subprocess.run(["g++", *flags, "-o", program, PROGRAM], check=True)
    told = subprocess.run([program], check=True, capture_output=True, text=True, timeout=120).stdout
    scores, values = map(float, told.split())
    assert scores < 1e-4
    assert values < 1e-4
