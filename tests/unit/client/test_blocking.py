"""The blocking client: the same calls from plain threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from tokenmill_client import Client, NotFound, RequestCancelled, RequestState

from tests.unit.client.conftest import QUICK
from tests.unit.client.fake_server import FakeServer, token, whole_text


@pytest.fixture
def blocking(server: FakeServer) -> Iterator[Client]:
    with Client(server.address, retry=QUICK) as client:
        yield client


def test_streams(blocking: Client) -> None:
    stream = blocking.generate("hello", max_tokens=4)
    assert "".join(delta.text for delta in stream) == whole_text(stream.request_id, 4)
    assert list(stream) == []
    assert stream.result().token_ids == tuple(token(stream.request_id, index) for index in range(4))


def test_c72_takes_a_stream_up_again(server: FakeServer, blocking: Client) -> None:
    server.cuts = [2, 2]
    output = blocking.generate("hello", max_tokens=6).result()
    assert output.text == whole_text(output.request_id, 6)
    assert server.calls == ["Generate", "Attach 1", "Attach 2"]


def test_calls(blocking: Client) -> None:
    blocking.wait_ready(timeout=20)
    assert blocking.submit("a", request_id="a", max_tokens=3).joined is False
    assert blocking.submit("a", request_id="a", max_tokens=3).joined is True
    assert blocking.attach("a").result().usage.output_tokens == 3
    assert blocking.get_request("a").info.state is RequestState.DONE
    assert blocking.tokenize("hi").token_ids == (104, 105)
    assert [model.name for model in blocking.list_models()] == ["oracle"]
    with pytest.raises(NotFound):
        blocking.cancel("b")


def test_admin_calls(blocking: Client) -> None:
    for number in range(5):
        blocking.submit("a", request_id=f"r{number}")
    assert [info.request_id for info in blocking.admin.list_requests(page_size=2)] == ["r4", "r3", "r2", "r1", "r0"]
    assert next(iter(blocking.admin.list_requests(page_size=2))).request_id == "r4"
    assert blocking.admin.update_request("r0", priority=2).priority == 2
    assert blocking.admin.get_request("r0").info.priority == 2
    assert blocking.admin.list_executors()[0].name == "executor-0"
    assert blocking.admin.get_load().policy == "fcfs"
    assert [outcome.state for outcome in blocking.admin.cancel_requests(["r1"])] == [RequestState.CANCELLED]


def test_c12_cancel_from_another_thread(server: FakeServer, blocking: Client) -> None:
    server.hold_at = 1
    stream = blocking.generate("hello")
    next(stream)
    canceller = threading.Thread(target=blocking.cancel, args=(stream.request_id,))
    canceller.start()
    with pytest.raises(RequestCancelled) as caught:
        stream.result()
    canceller.join()
    assert caught.value.output.usage.output_tokens == 1


def test_leaving_early(server: FakeServer, blocking: Client) -> None:
    server.hold_at = 1
    with blocking.generate("hello") as stream:
        next(stream)
    assert list(stream) == []


def test_close_twice(server: FakeServer) -> None:
    client = Client(server.address)
    client.list_models()
    client.close()
    client.close()
    with pytest.raises(RuntimeError, match="closed"):
        client.list_models()
