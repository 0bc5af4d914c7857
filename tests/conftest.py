"""Fixtures for all tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
import structlog

from tests.fakes.postgres import PostgresServer, postgres_server

# What a script starts with `&` ignores Ctrl-C, and so would all that it starts: tests send it to the processes they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Torch's threads wait for each other by spinning: on few cores that costs the small models here five times their own work.
os.environ.setdefault("OMP_NUM_THREADS", "1")
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
