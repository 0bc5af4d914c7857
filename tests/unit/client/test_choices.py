"""Streams of several choices over real gRPC: each whole and apart from the others, however often the connection is cut."""

from __future__ import annotations

import json

import pytest
from tokenmill_client import AsyncClient, BrokenStream, Client, FinishReason, Output, RequestFailed, RequestState, Usage
from tokenmill_client.progress import Progress
from tokenmill_client.records import Accepted, Delta, Finished

from tests.unit.client.conftest import Run
from tests.unit.client.fake_server import FakeServer, choice_name, token, whole_text

N, MAX_TOKENS = 3, 4


def assert_whole(outputs: tuple[Output, ...]) -> None:
    """Choice i has i tokens fewer."""
    assert [output.choice for output in outputs] == list(range(N))
    for output in outputs:
        name, count = choice_name(output.request_id, output.choice), MAX_TOKENS - output.choice
        assert output.token_ids == tuple(token(name, index) for index in range(count))
        assert output.text == whole_text(name, count)
        assert (output.usage, output.finish_reason) == (Usage(3, count), FinishReason.LENGTH)


async def test_deltas_say_whose_they_are_and_usage_counts_the_prompt_once(client: AsyncClient) -> None:
    stream = client.generate("hello", max_tokens=MAX_TOKENS, n=N)
    deltas = [delta async for delta in stream]
    assert [delta.choice for delta in deltas[:3]] == [0, 1, 2]
    assert_whole(stream.outputs)
    assert stream.usage == Usage(3, 4 + 3 + 2)
    assert stream.output == stream.outputs[0] == await stream.result()


# Acceptance, then of each choice its deltas, the tail of its text and its end: 1 + 6 + 5 + 4.
@pytest.mark.parametrize("cut", range(16))
async def test_c72_a_cut_anywhere_loses_and_doubles_nothing_of_any_choice(
    server: FakeServer, client: AsyncClient, cut: int
) -> None:
    server.cuts = [cut]
    assert_whole(await client.generate("hello", max_tokens=MAX_TOKENS, n=N).results())
    assert len(server.calls) == 2
    assert server.calls[1].startswith("Attach" if cut else "Generate")


async def test_c72_many_cuts_in_one_stream_of_choices(server: FakeServer, client: AsyncClient) -> None:
    server.cuts = [0, 1, 3, 1, 4, 5, 2, 6]
    assert_whole(await client.generate("hello", max_tokens=MAX_TOKENS, n=N).results())


async def test_attaching_finds_all_choices(server: FakeServer, client: AsyncClient) -> None:
    await client.generate("hello", max_tokens=MAX_TOKENS, n=N, request_id="r").results()
    server.cuts = [5]
    assert_whole(await client.attach("r").results())
    assert server.calls == ["Generate", "Attach 0", "Attach 2 1 1"]


async def test_one_choice_that_failed_is_an_error_once_all_are_there(server: FakeServer, client: AsyncClient) -> None:
    server.failing_choices = [1]
    stream = client.generate("hello", max_tokens=MAX_TOKENS, n=N)
    with pytest.raises(RequestFailed, match="it broke") as failure:
        await stream.results()
    assert failure.value.output == stream.outputs[1]
    assert [output.finish_reason for output in stream.outputs] == [FinishReason.LENGTH] * 3


def test_the_blocking_client_has_the_same(server: FakeServer) -> None:
    with Client(server.address) as client, client.generate("hello", max_tokens=MAX_TOKENS, n=N) as stream:
        assert_whole(stream.results())
        assert stream.usage == Usage(3, 9)


def test_the_command_prints_each_choice(run: Run) -> None:
    code, out, _ = run("generate", "hello", "--request-id", "r", "-m", "3", "-n", "2")
    assert (code, out) == (0, f"choice 0: length\n{whole_text('r', 3)}\nchoice 1: length\n{whole_text('r/1', 2)}\n")
    code, out, _ = run("generate", "hello", "-m", "3", "-n", "2", "--best-of", "2", "--json")
    assert [document["choice"] for document in json.loads(out)] == [0, 1]


# ---- what must not come --------------------------------------------------------------------------------------------------------


def finished(choice: int, output_tokens: int) -> Finished:
    return Finished(RequestState.DONE, FinishReason.STOP, Usage(3, output_tokens), choice=choice)


def greeted(num_choices: int = 2) -> Progress:
    progress = Progress("a")
    progress.take(Accepted("a", 3, num_choices))
    return progress


def test_an_end_that_comes_again_after_a_reconnection_is_passed_over_once() -> None:
    progress = greeted()
    progress.take(Delta(0, 1, (5,), choice=1))
    progress.take(finished(1, 1))
    progress.reconnected()
    progress.take(Accepted("a", 3, 2))
    assert progress.take(Delta(1, 0, text="tail", choice=1)) is None
    assert progress.take(finished(1, 1)) is None
    with pytest.raises(BrokenStream, match="after the end of choice 1 of request a"):
        progress.take(finished(1, 1))
    assert not progress.is_over
    progress.take(finished(0, 0))
    assert progress.is_over


def test_a_token_after_its_choices_end_is_refused() -> None:
    progress = greeted()
    progress.take(finished(0, 0))
    progress.reconnected()
    progress.take(Accepted("a", 3, 2))
    with pytest.raises(BrokenStream, match="after the end of choice 0"):
        progress.take(Delta(0, 1, (5,)))


def test_an_index_of_another_choice_is_refused() -> None:
    progress = greeted()
    progress.take(Delta(0, 1, (5,), choice=0))
    with pytest.raises(BrokenStream, match="Choice 1 of request a: expected output token 0, got 1"):
        progress.take(Delta(1, 1, (6,), choice=1))


def test_a_choice_that_there_is_not_is_refused() -> None:
    with pytest.raises(BrokenStream, match="has 2 choices, an event came for choice 2"):
        greeted().take(Delta(0, 1, (5,), choice=2))


def test_another_number_of_choices_after_a_reconnection_is_refused() -> None:
    progress = greeted()
    progress.reconnected()
    with pytest.raises(BrokenStream, match="had 2 choices, now it has 3"):
        progress.take(Accepted("a", 3, 3))


def test_one_choice_by_its_own_id_is_the_only_one_whatever_its_number() -> None:
    progress = Progress("a/3")
    progress.take(Accepted("a/3", 3, 1))
    assert progress.take(Delta(0, 1, (5,), choice=3)) is not None
    progress.take(finished(3, 1))
    assert progress.output.token_ids == (5,)
