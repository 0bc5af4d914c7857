from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fakes.processes import Processes


@pytest.fixture
def processes() -> Iterator[Processes]:
    with Processes() as running:
        yield running
