"""Calls to a scheduler over gRPC whose answers can be foretold: what the simulated executor makes of a request, token by token."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterable, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import grpc
from tokenmill.admin.v1 import admin_pb2_grpc
from tokenmill.inference.v1 import inference_pb2 as pb
from tokenmill.inference.v1 import inference_pb2_grpc
from tokenmill.inference.v1.types_pb2 import SamplingParams, StreamEvent
from tokenmill_executor.simulated import prompt_digest, simulated_token

if TYPE_CHECKING:
    from tokenmill.admin.v1.admin_pb2_grpc import AdminServiceAsyncStub
    from tokenmill.inference.v1.inference_pb2_grpc import InferenceServiceAsyncStub

BOTH = pb.OutputOptions(text=True, token_ids=True)
PATIENCE_S = 60.0


def foretold(prompt: Sequence[int], count: int, seed: int = 1) -> list[int]:
    """The output tokens of the simulated executor."""
    digest = prompt_digest(prompt)
    return [simulated_token(digest, seed, len(prompt) + index) for index in range(count)]


def spec(prompt: Sequence[int], max_tokens: int, request_id: str = "", seed: int = 1, **changes: Any) -> pb.RequestSpec:
    sampling = SamplingParams(
        max_tokens=max_tokens, seed=seed, stop=changes.pop("stop", ()), min_tokens=changes.pop("min_tokens", None)
    )
    form = pb.Prompt(token_ids=pb.TokenIds(ids=prompt))
    return pb.RequestSpec(request_id=request_id, prompt=form, sampling=sampling, **changes)


@dataclass
class Stream:
    """What one stream gave from `next_index` on. Adding an event checks that each index comes once, in order."""

    next_index: int = 0
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    deltas: int = 0
    finished: StreamEvent.Finished | None = None

    def add(self, event: StreamEvent) -> None:
        if event.HasField("delta"):
            assert event.delta.token_count == len(event.delta.token_ids)
            assert event.delta.first_index == self.next_index + len(self.tokens)
            self.tokens += event.delta.token_ids
            self.text += event.delta.text
            self.deltas += 1
        elif event.HasField("finished"):
            self.finished = event.finished

    async def read(self, responses: AsyncIterable[Any], until_tokens: int | None = None) -> Self:
        """To the end, or until at least so many tokens are in; 0 is satisfied by the first event."""
        async for response in responses:
            self.add(response.event)
            if until_tokens is not None and len(self.tokens) >= until_tokens:
                break
        return self


class Caller:
    def __init__(self, address: str, options: Sequence[tuple[str, int]] = ()) -> None:
        # Each its own connection, so that a dead one is not remembered.
        self._channel = grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1), *options])
        self.inference: InferenceServiceAsyncStub = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self.admin: AdminServiceAsyncStub = admin_pb2_grpc.AdminServiceStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._channel.close(None)

    def generate(self, request: pb.RequestSpec) -> Any:
        return self.inference.Generate(pb.GenerateRequest(request=request, output=BOTH))

    def attach(self, request_id: str, next_index: int = 0) -> Any:
        return self.inference.Attach(pb.AttachRequest(request_id=request_id, next_index=next_index, output=BOTH))

    async def submit(self, request: pb.RequestSpec) -> pb.SubmitResponse:
        return await self.inference.Submit(pb.SubmitRequest(request=request))

    async def run(self, request: pb.RequestSpec) -> Stream:
        return await Stream().read(self.generate(request))

    async def state(self, request_id: str) -> int:
        return (await self.inference.GetRequest(pb.GetRequestRequest(request_id=request_id))).request.state


async def eventually(holds: Callable[[], Awaitable[bool]]) -> None:
    """Returns once it holds; AssertionError when it never does."""
    give_up_s = time.monotonic() + PATIENCE_S
    while not await holds():
        assert time.monotonic() < give_up_s, "it never came to hold"
        await asyncio.sleep(0.01)
