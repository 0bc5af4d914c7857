"""Kernels run in Triton's interpreter: see `tests/conftest.py`. Without Triton there is nothing to test."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)
