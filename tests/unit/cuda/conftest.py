"""Kernels run in Triton's interpreter: see `tests/conftest.py`. Without Triton, which not every platform has, nothing is tested."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

collect_ignore_glob = [] if find_spec("triton") else ["test_*.py"]


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)
