"""Streams over real gRPC: whole, cut in every place, cancelled, refused."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from tokenmill_client import (
    AsyncClient,
    DeadlineExceeded,
    FinishReason,
    InvalidRequest,
    NoSecureConnection,
    NotFound,
    Output,
    QueueFull,
    RequestCancelled,
    RetryPolicy,
    StreamLost,
    Tls,
    Unavailable,
    Usage,
)
from tokenmill_client.options import OutputForm

from tests.unit.client.conftest import QUICK
from tests.unit.client.fake_server import FakeServer, bad_request, queue_full, text_of, token, whole_text


def assert_whole(output: Output, count: int) -> None:
    assert output.token_ids == tuple(token(output.request_id, index) for index in range(count))
    assert output.text == whole_text(output.request_id, count)
    assert output.usage == Usage(3, count)
    assert output.finish_reason is FinishReason.LENGTH


async def test_streams_deltas_and_gathers_the_result(client: AsyncClient) -> None:
    stream = client.generate("hello", max_tokens=5)
    deltas = [delta async for delta in stream]
    assert [delta.first_index for delta in deltas if delta.token_count] == [0, 1, 2, 3, 4]
    assert "".join(delta.text for delta in deltas) == whole_text(stream.request_id, 5)
    assert_whole(await stream.result(), 5)


# A stream of 4 tokens has 7 messages: acceptance, 4 deltas, the tail of the text, the end.
@pytest.mark.parametrize("cut", range(7))
async def test_c72_a_cut_anywhere_loses_and_doubles_nothing(server: FakeServer, client: AsyncClient, cut: int) -> None:
    server.cuts = [cut]
    assert_whole(await client.generate("hello", max_tokens=4).result(), 4)
    resumed = f"Attach {min(cut - 1, 4)}" if cut else "Generate"
    assert server.calls == ["Generate", resumed]


async def test_c72_many_cuts_in_one_stream(server: FakeServer, client: AsyncClient) -> None:
    server.cuts = [0, 1, 1, 2, 3, 1, 2]
    assert_whole(await client.generate("hello", max_tokens=6).result(), 6)


async def test_c72_survives_the_restart_of_the_server(server: FakeServer, client: AsyncClient) -> None:
    server.hold_at = 3
    stream = client.generate("hello", max_tokens=6)
    assert (await anext(stream)).first_index == 0
    server.hold_at = None
    await asyncio.to_thread(server.stop)
    server.start()
    assert_whole(await stream.result(), 6)


async def test_c09_sending_again_joins(server: FakeServer, client: AsyncClient) -> None:
    server.cuts = [0, 0, 0]
    await client.generate("hello", max_tokens=2).result()
    assert server.calls == ["Generate"] * 4
    assert len(server.requests) == 1


async def test_gives_up_when_the_limit_is_over(server: FakeServer) -> None:
    retry = RetryPolicy(first_delay_s=0.01, longest_delay_s=0.02, attach_limit_s=0.1)
    server.hold_at = 3
    async with AsyncClient(server.address, retry=retry) as client:
        stream = client.generate("hello", max_tokens=6)
        await anext(stream)
        await asyncio.to_thread(server.stop)
        with pytest.raises(StreamLost, match="Nothing answers at") as caught:
            await stream.result()
        had = stream.output.usage.output_tokens
        assert had >= 1
        assert (caught.value.request_id, caught.value.next_index) == (stream.request_id, had)
    server.hold_at = None
    server.start()
    async with AsyncClient(server.address, retry=QUICK) as client:
        rest = await client.attach(caught.value.request_id, caught.value.next_index).result()
    assert rest.token_ids == tuple(token(stream.request_id, index) for index in range(had, 6))


async def test_its_own_timeout_is_all_the_patience_a_stream_has(server: FakeServer) -> None:
    """Without one it would give up at once here, and with it, it does not go on after."""
    await asyncio.to_thread(server.stop)
    async with AsyncClient(
        server.address, retry=RetryPolicy(first_delay_s=0.01, longest_delay_s=0.02, attach_limit_s=0.0)
    ) as client:
        with pytest.raises(StreamLost):
            await client.attach("r").result()
        with pytest.raises(DeadlineExceeded):
            await client.attach("r", timeout=0.2).result()


async def test_to_attach_waits_for_a_scheduler_that_is_not_there_yet(server: FakeServer, client: AsyncClient) -> None:
    submitted = await client.submit("hello", max_tokens=4)
    await asyncio.to_thread(server.stop)
    # The limit of calls does not count.
    async with AsyncClient(server.address, retry=RetryPolicy(first_delay_s=0.01, longest_delay_s=0.02, call_limit_s=0.0)) as other:
        reading = asyncio.create_task(other.attach(submitted.request_id).result())
        done, _ = await asyncio.wait([reading], timeout=0.2)
        assert not done
        server.start()
        assert_whole(await reading, 4)


async def test_what_no_waiting_cures_is_told_soon(server: FakeServer) -> None:
    """A client that wants TLS where there is none."""
    retry = RetryPolicy(first_delay_s=0.01, longest_delay_s=0.02, call_limit_s=0.1)
    async with AsyncClient(server.address, retry=retry, tls=Tls()) as client:
        with pytest.raises(NoSecureConnection):
            await client.attach("some").result()


async def test_connections_that_bring_no_token_are_bounded(server: FakeServer) -> None:
    server.cuts = [1] * 10_000
    retry = RetryPolicy(first_delay_s=0.01, longest_delay_s=0.01, attach_limit_s=0.1)
    async with AsyncClient(server.address, retry=retry) as client:
        with pytest.raises(Unavailable):
            await client.generate("hello").result()


async def test_attach_from_an_index(server: FakeServer, client: AsyncClient) -> None:
    submitted = await client.submit("hello", max_tokens=5)
    output = await client.attach(submitted.request_id, 2).result()
    assert output.token_ids == tuple(token(submitted.request_id, index) for index in range(2, 5))
    assert output.text == whole_text(submitted.request_id, 5)[len(text_of(submitted.request_id, 0, 2)) :]


async def test_attach_to_nothing(client: AsyncClient) -> None:
    with pytest.raises(NotFound):
        await client.attach("nobody").result()


async def test_c12_cancelled_by_another_client_with_the_output_so_far(server: FakeServer, client: AsyncClient) -> None:
    server.hold_at = 2
    stream = client.generate("hello", max_tokens=6)
    await anext(stream)
    await anext(stream)
    async with AsyncClient(server.address) as other:
        assert (await other.cancel(stream.request_id)).already_ended is False
        # C03
        assert (await other.cancel(stream.request_id)).already_ended is True
    with pytest.raises(RequestCancelled) as caught:
        await stream.result()
    assert caught.value.output.token_ids == tuple(token(stream.request_id, index) for index in range(2))
    assert caught.value.output.finish_reason is FinishReason.CANCELLED


async def test_a_refusal_is_not_tried_again(server: FakeServer, client: AsyncClient) -> None:
    server.refuse(grpc.StatusCode.INVALID_ARGUMENT, "top_p is wrong.", bad_request(("sampling.top_p", "must be in (0, 1]")))
    with pytest.raises(InvalidRequest, match="top_p is wrong") as caught:
        await client.generate("hello", top_p=7).result()
    assert caught.value.violations == (("sampling.top_p", "must be in (0, 1]"),)
    assert server.calls == ["Generate"]


async def test_c38_a_full_queue_says_when_to_try_again(server: FakeServer, client: AsyncClient) -> None:
    server.refuse(grpc.StatusCode.RESOURCE_EXHAUSTED, "The queue is full.", queue_full(1.5))
    with pytest.raises(QueueFull) as caught:
        await client.generate("hello").result()
    assert caught.value.retry_delay_s == 1.5


async def test_a_server_that_is_not_ready_is_tried_again(server: FakeServer, client: AsyncClient) -> None:
    server.refuse(grpc.StatusCode.UNAVAILABLE, "No executor yet.", queue_full(0.01))
    assert_whole(await client.generate("hello", max_tokens=2).result(), 2)


async def test_the_timeout_is_the_requests_and_bounds_the_stream(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenmill_client.aio._DEADLINE_MARGIN_S", 0.1)
    server.hold_at = 1
    async with AsyncClient(server.address, retry=QUICK) as client:
        stream = client.generate("hello", timeout=0.1)
        with pytest.raises(DeadlineExceeded):
            await stream.result()
    request = server.requests[stream.request_id]
    assert request.spec.timeout.ToMilliseconds() == 100


async def test_leaving_early_ends_the_call(server: FakeServer, client: AsyncClient) -> None:
    server.hold_at = 1
    async with client.generate("hello") as stream:
        await anext(stream)
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_a_cancelled_read_closes_the_stream(server: FakeServer, client: AsyncClient) -> None:
    server.hold_at = 0
    stream = client.generate("hello")
    reading = asyncio.create_task(stream.result())
    await asyncio.to_thread(server.called.wait, 20)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert [delta async for delta in stream] == []


@pytest.mark.parametrize(("form", "text", "token_ids"), [("text", True, False), ("token_ids", False, True), ("both", True, True)])
async def test_output_forms(server: FakeServer, client: AsyncClient, form: OutputForm, text: bool, token_ids: bool) -> None:
    server.cuts = [2]
    output = await client.generate("hello", max_tokens=3, output=form).result()
    assert (bool(output.text), bool(output.token_ids)) == (text, token_ids)
    assert output.usage.output_tokens == 3
