"""An executor that answers nonsense, over gRPC on both sides: the scheduler ends the epoch, every request has its tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from tokenmill.executor.v1 import executor_pb2 as pb
from tokenmill.executor.v1 import executor_pb2_grpc

from tests.fakes.calls import Caller, foretold, spec
from tests.fakes.processes import Processes, wait_serving

PROMPTS = [[40 + request, *range(50, 90)] for request in range(4)]
NUM_TOKENS = 30


class Rogue(executor_pb2_grpc.ExecutorServiceServicer):
    """Stands before a true executor and spoils one result with rows, when `spoil` is set."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._executor: Any = executor_pb2_grpc.ExecutorServiceStub(channel)
        self.spoil: Callable[[pb.Result], object] | None = None
        self.epochs = 0

    async def Describe(self, request: pb.DescribeRequest, context: Any) -> pb.DescribeResponse:  # noqa: N802
        description: pb.DescribeResponse = await self._executor.Describe(request)
        return description

    async def GetTokenizer(  # noqa: N802
        self, request: pb.GetTokenizerRequest, context: Any
    ) -> AsyncIterator[pb.GetTokenizerResponse]:
        async for piece in self._executor.GetTokenizer(request):
            yield piece

    async def Run(self, requests: AsyncIterator[pb.RunRequest], context: Any) -> AsyncIterator[pb.RunResponse]:  # noqa: N802
        self.epochs += 1
        async for response in self._executor.Run(requests):
            if self.spoil is not None and response.result.sequence_ids:
                spoil, self.spoil = self.spoil, None
                spoil(response.result)
            yield response


@asynccontextmanager
async def rogue_before(executor_address: str, listen: str) -> AsyncIterator[Rogue]:
    server = grpc.aio.server()
    async with grpc.aio.insecure_channel(executor_address) as channel:
        rogue = Rogue(channel)
        executor_pb2_grpc.add_ExecutorServiceServicer_to_server(rogue, server)
        server.add_insecure_port(listen)
        await server.start()
        try:
            yield rogue
        finally:
            await server.stop(None)


@pytest.fixture
def processes() -> Iterator[Processes]:
    with Processes() as running:
        yield running


def twice(result: pb.Result) -> None:
    """Every row again."""
    columns = ("sequence_ids", "num_computed", "num_sampled", "token_ids", "finishes", "num_cached")
    for column in columns:
        getattr(result, column).extend(list(getattr(result, column)))


def more_than_asked(result: pb.Result) -> None:
    result.num_computed[0] = 2**32 - 1


def unequal(result: pb.Result) -> None:
    result.num_sampled.append(1)
    result.logprobs.add(logprob=-1.0)


def outside_the_vocabulary(result: pb.Result) -> None:
    result.token_ids[:] = [2**32 - 1] * len(result.token_ids)
    if not result.token_ids:
        more_than_asked(result)


def thousands_of_tokens(result: pb.Result) -> None:
    result.num_sampled[0] += 5_000
    result.token_ids[:] = [7] * sum(result.num_sampled)


def no_end(result: pb.Result) -> None:
    result.finishes[:] = [pb.SEQUENCE_FINISH_LENGTH] * len(result.finishes)
    result.num_computed[:] = [2**31] * len(result.num_computed)


def nobodys_sequence(result: pb.Result) -> None:
    result.sequence_ids[0] = 2**64 - 1


def endless_blocks(result: pb.Result) -> None:
    result.blocks.free = 2**32 - 1


def another_plan(result: pb.Result) -> None:
    result.plan_id += 1


SPOILS = [
    twice,
    more_than_asked,
    unequal,
    outside_the_vocabulary,
    thousands_of_tokens,
    no_end,
    nobodys_sequence,
    endless_blocks,
    another_plan,
]


async def test_an_executor_that_answers_nonsense_loses_and_crosses_no_request(processes: Processes) -> None:
    listen = f"unix:{processes.folder / 'rogue.sock'}"
    async with rogue_before(processes.executor().address, listen) as rogue:
        scheduler = processes.scheduler(listen)
        await wait_serving(scheduler.address)
        async with Caller(scheduler.address) as caller:
            for number, spoil in enumerate(SPOILS):
                rogue.spoil = spoil
                async with asyncio.timeout(60):
                    streams = await asyncio.gather(*(caller.run(spec(prompt, NUM_TOKENS)) for prompt in PROMPTS))
                tokens = [stream.tokens for stream in streams]
                assert tokens == [foretold(prompt, NUM_TOKENS) for prompt in PROMPTS], spoil.__name__
                assert rogue.epochs == number + 2, f"{spoil.__name__} was believed"
    assert scheduler.runs
