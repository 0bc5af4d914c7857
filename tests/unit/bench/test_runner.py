"""Workloads sent over real gRPC and real HTTP, their times and counts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace

import pytest
from tokenmill_cli.bench.grpc_target import GrpcTarget
from tokenmill_cli.bench.openai_target import OpenAiTarget
from tokenmill_cli.bench.runner import RequestTiming, Tally, TargetError, Workload, run_workload
from tokenmill_client import AsyncClient, RetryPolicy
from tokenmill_workloads import Arrival, burst

from tests.unit.bench.openai_server import OpenAiServer
from tests.unit.client.fake_server import FakeServer

SMALL = Workload.of("burst", burst(5, output_tokens=(2, 6)), vocab_size=1_000, seed=42)


def ignore(tally: Tally) -> None: ...


@pytest.fixture
def server() -> Iterator[FakeServer]:
    server = FakeServer()
    server.start()
    yield server
    server.stop()


@pytest.fixture
async def client(server: FakeServer) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(server.address, retry=RetryPolicy(call_limit_s=0.0)) as client:
        yield client


@pytest.fixture
def openai() -> Iterator[OpenAiServer]:
    with OpenAiServer() as server:
        yield server


async def test_a_scheduler_is_sent_a_workload(server: FakeServer, client: AsyncClient) -> None:
    tallies: list[int] = []
    run = await run_workload(GrpcTarget(client), SMALL, lambda tally: tallies.append(tally.output_tokens))
    assert [timing.output_tokens for timing in run.timings] == [arrival.output_tokens for arrival in SMALL.arrivals]
    assert [timing.prompt_tokens for timing in run.timings] == [arrival.prompt_tokens for arrival in SMALL.arrivals]
    assert tallies[-1] == SMALL.output_tokens
    assert all(0 <= timing.sent_s <= timing.token_times_s[0] <= timing.finished_s <= run.wall_s for timing in run.timings)
    assert all(request.spec.sampling.ignore_eos for request in server.requests.values())
    sent = sorted(tuple(request.spec.prompt.token_ids.ids) for request in server.requests.values())
    assert sent == sorted(SMALL.prompts)
    assert run.slots
    assert run.occupancy
    assert run.client_cpu_s > 0


async def test_requests_are_sent_when_they_are_due(client: AsyncClient) -> None:
    arrivals = (Arrival(0.0, 3, 2), Arrival(0.1, 3, 2), Arrival(0.05, 3, 2))
    run = await run_workload(GrpcTarget(client), Workload.of("three", arrivals, 1_000, 1), ignore)
    assert all(timing.sent_s >= arrival.at_s for timing, arrival in zip(run.timings, arrivals, strict=True))


async def test_requests_that_are_due_together_are_sent_in_their_order(client: AsyncClient) -> None:
    asked: list[Sequence[int]] = []

    class Noting(GrpcTarget):
        def generate(self, prompt: Sequence[int], output_tokens: int) -> AsyncIterator[int]:
            asked.append(prompt)
            return super().generate(prompt, output_tokens)

    workload = Workload.of("together", [Arrival(0.0, 3, 2)] * 2 + [Arrival(0.05, 3, 2)] * 30, 1_000, 1)
    await run_workload(Noting(client), workload, ignore)
    assert asked == list(workload.prompts)


async def test_a_request_that_fails_leaves_the_others_alone(client: AsyncClient) -> None:
    class FullOnce(GrpcTarget):
        """Has no room for the first request."""

        async def generate(self, prompt: Sequence[int], output_tokens: int) -> AsyncIterator[int]:
            if prompt == SMALL.prompts[0]:
                raise TargetError("no room")
            async for count in super().generate(prompt, output_tokens):
                yield count

    run = await run_workload(FullOnce(client), SMALL, ignore)
    assert len(run.timings) == 4
    assert run.failures == ("no room",)


async def test_an_openai_style_server_is_sent_a_workload(openai: OpenAiServer) -> None:
    async with OpenAiTarget(openai.base_url, api_key="secret") as target:
        assert target.model == "some-model"
        run = await run_workload(target, SMALL, ignore)
    assert [timing.output_tokens for timing in run.timings] == [arrival.output_tokens for arrival in SMALL.arrivals]
    assert {tuple(body["prompt"]) for body in openai.bodies} == set(SMALL.prompts)
    assert {(body["ignore_eos"], body["temperature"], body["model"]) for body in openai.bodies} == {(True, 0, "some-model")}
    assert set(openai.keys) == {"Bearer secret"}
    assert (run.slots, run.occupancy) == (0, ())


async def test_events_of_several_tokens_come_to_the_right_count(openai: OpenAiServer) -> None:
    openai.tokens_per_event = 4
    async with OpenAiTarget(openai.base_url) as target:
        assert sum([count async for count in target.generate([1], 10)]) == 10


async def test_a_server_that_does_not_count_is_taken_by_its_events(openai: OpenAiServer) -> None:
    openai.usage = False
    async with OpenAiTarget(openai.base_url) as target:
        assert sum([count async for count in target.generate([1], 10)]) == 10


async def test_a_server_that_stops_early_has_failed(openai: OpenAiServer) -> None:
    openai.stop_after = 1
    async with OpenAiTarget(openai.base_url) as target:
        run = await run_workload(target, Workload.of("one", (Arrival(0.0, 3, 5),), 1_000, 1), ignore)
    assert run.timings == ()
    assert run.failures == ("5 tokens were asked for, 2 came",)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"status": 429}, "HTTP 429: no room"),
        ({"broken": "{"}, "does not stream completions"),
        ({"broken": '{"error": {"message": "out of memory"}}'}, "out of memory"),
    ],
)
async def test_what_a_server_answers_instead_is_told(openai: OpenAiServer, changes: dict[str, object], message: str) -> None:
    for name, value in changes.items():
        setattr(openai, name, value)
    async with OpenAiTarget(openai.base_url) as target:
        with pytest.raises(TargetError, match=message):
            [count async for count in target.generate([1], 3)]


async def test_nothing_that_listens_is_told() -> None:
    with pytest.raises(TargetError, match="does not name a model"):
        async with OpenAiTarget("http://127.0.0.1:1/v1"):
            pass


def test_times_of_a_request() -> None:
    timing = RequestTiming(5, 1.0, 4.0, (2.0, 2.5, 4.0), (2, 1, 3))
    assert timing.output_tokens == 6
    assert timing.time_to_first_token_s == 1.0
    assert timing.time_per_output_token_s == 0.5
    assert timing.inter_token_latencies_s == (0.5, 1.5)
    assert timing.latency_s == 3.0
    assert replace(timing, token_times_s=(2.0,), token_counts=(6,)).time_per_output_token_s is None
