"""The scheduler's side of the plan protocol, as plain as can be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import grpc
from tokenmill.executor.v1 import executor_pb2 as pb

if TYPE_CHECKING:
    # Exists in the typed stubs only.
    from tokenmill.executor.v1.executor_pb2_grpc import ExecutorServiceAsyncStub


def admission(sequence_id: int, tokens: Sequence[int], max_tokens: int = 8) -> pb.Admission:
    sampling = pb.Sampling(max_tokens=max_tokens, top_p=1.0, repetition_penalty=1.0)
    return pb.Admission(sequence_id=sequence_id, token_ids=tokens, num_prompt_tokens=len(tokens), sampling=sampling)


class FakeScheduler:
    def __init__(self, stub: ExecutorServiceAsyncStub, epoch: int) -> None:
        self.epoch = epoch
        # The typed stubs leave out that requests may be written one by one.
        self.call = stub.Run()  # type: ignore[call-arg]
        self.plan_id = 0
        self.heartbeats: list[pb.Heartbeat] = []

    async def hello(self) -> pb.Welcome:
        await self.call.write(pb.RunRequest(hello=pb.Hello(epoch=self.epoch)))
        return (await self.receive()).welcome

    async def hello_refused(self) -> tuple[grpc.StatusCode, str]:
        await self.call.write(pb.RunRequest(hello=pb.Hello(epoch=self.epoch)))
        return await self.ended()

    async def send(
        self,
        advance: dict[int, int],
        admit: Sequence[pb.Admission] = (),
        release: Sequence[int] = (),
        max_steps: int = 0,
        after_all_steps: bool = False,
    ) -> None:
        self.plan_id += 1
        plan = pb.Plan(
            epoch=self.epoch,
            plan_id=self.plan_id,
            release=release,
            admit=admit,
            advance_sequence_ids=list(advance),
            advance_max_tokens=list(advance.values()),
            max_steps=max_steps,
            after_all_steps=after_all_steps,
        )
        await self.call.write(pb.RunRequest(plan=plan))

    async def goodbye(self) -> None:
        await self.call.write(pb.RunRequest(goodbye=pb.Goodbye()))

    async def receive(self) -> pb.RunResponse:
        response = await self.call.read()
        assert isinstance(response, pb.RunResponse), await self.call.details()
        return response

    async def result(self) -> pb.Result:
        """The next result; heartbeats before it are kept in `heartbeats`."""
        while (response := await self.receive()).WhichOneof("message") == "heartbeat":
            self.heartbeats.append(response.heartbeat)
        return response.result

    async def heartbeat(self) -> pb.Heartbeat:
        return (await self.receive()).heartbeat

    async def ended(self) -> tuple[grpc.StatusCode, str]:
        """How the stream ended, whatever came before."""
        try:
            while isinstance(await self.call.read(), pb.RunResponse):
                pass
        except grpc.aio.AioRpcError:
            # The status is asked for below, however it was told.
            pass
        return await self.call.code(), await self.call.details()
