"""Fixtures for all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import structlog

from tests.fakes.postgres import PostgresServer, postgres_server

# Triton decides on import whether its kernels are compiled for a GPU or interpreted.
os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """One real PostgreSQL server for the whole session, started when the first test asks for it."""
    with postgres_server() as server:
        yield server


@pytest.fixture(autouse=True)
def _logs_as_they_were() -> Iterator[None]:
    """A service's `main` sets them up for its process, which here is everybody's."""
    yield
    structlog.reset_defaults()
