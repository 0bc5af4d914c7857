from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
from tokenmill_client import AsyncClient, RetryPolicy

from tests.unit.client.fake_server import FakeServer

# As the default one, in less time.
QUICK = RetryPolicy(first_delay_s=0.01, longest_delay_s=0.05, call_limit_s=2.0, attach_limit_s=10.0)


@pytest.fixture
def server() -> Iterator[FakeServer]:
    server = FakeServer()
    server.start()
    yield server
    server.stop()


@pytest.fixture
async def client(server: FakeServer) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(server.address, retry=QUICK) as client:
        yield client
