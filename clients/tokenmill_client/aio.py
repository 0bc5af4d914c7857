"""The client for asyncio. Must not know: how messages look (`wire`), how a stream survives (`stream`)."""

from __future__ import annotations

import asyncio
import time
from types import TracebackType
from typing import Self, Unpack

import grpc
from tokenmill.inference.v1 import inference_pb2_grpc

from tokenmill_client.admin import AsyncAdmin
from tokenmill_client.call import StreamCall
from tokenmill_client.errors import Unavailable
from tokenmill_client.identity import new_request_id
from tokenmill_client.multiplex import Multiplexer
from tokenmill_client.options import GenerateOptions, OutputForm, PromptForms, SubmitOptions
from tokenmill_client.progress import Progress
from tokenmill_client.records import Cancellation, Model, RequestSnapshot, Submitted, Tokenized
from tokenmill_client.retry import RetryPolicy
from tokenmill_client.security import Tls
from tokenmill_client.stream import AsyncStream
from tokenmill_client.transport import Transport
from tokenmill_client.wire import health, incoming, outgoing

DEFAULT_ADDRESS = "127.0.0.1:7600"
_SERVICE = "tokenmill.inference.v1.InferenceService"
# The server ends a request at its own deadline and sends what it has; only a server that does not answer reaches this.
_DEADLINE_MARGIN_S = 5.0


class AsyncClient:
    """Calls a scheduler at `address` (`host:port` or `unix:PATH`). Use it in one event loop.

    Several addresses, with commas between them, are those of schedulers on one database: a call or a stream whose scheduler is
    lost goes on at the next.

    `timeout` (seconds) is the deadline of every call that is given none; streams have none of their own. While the server is
    unavailable, calls are tried again as `retry` says. `token` is sent with every call; give `tls` with it wherever
    others can listen. Every method raises a `TokenmillError`.
    `admin` has the operator's calls.
    """

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        timeout: float = 30.0,
        retry: RetryPolicy | None = None,
        token: str | None = None,
        tls: Tls | None = None,
    ) -> None:
        """Raises OSError or ValueError when the files for TLS or the token are not right."""
        self._transport = Transport(address, timeout, retry or RetryPolicy(), token, tls)
        self._streams = Multiplexer(self._transport)
        self.admin = AsyncAdmin(self._transport)

    @property
    def address(self) -> str:
        return self._transport.address

    async def close(self) -> None:
        """Ends every stream; their requests are cancelled unless detached."""
        await self._streams.close()
        await self._transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    def generate(
        self, prompt: str | None = None, *, output: OutputForm = "both", **options: Unpack[GenerateOptions]
    ) -> AsyncStream:
        """A stream of a new request's output, of all its choices; it is sent when the stream is first read.

        It carries a request id, drawn here unless given, so that sending it again after a failure joins the first.
        """
        options["request_id"] = options.get("request_id") or new_request_id()
        request = outgoing.generate(prompt, output, options)
        timeout = options.get("timeout")

        def connect(progress: Progress, remaining_s: float | None) -> StreamCall:
            if progress.accepted:
                return self._attach(progress, output, remaining_s)
            return self._streams.open(request, remaining_s)

        progress = Progress(request.request.request_id)
        return AsyncStream(self._transport, connect, progress, None if timeout is None else timeout + _DEADLINE_MARGIN_S)

    def attach(
        self, request_id: str, next_index: int = 0, *, output: OutputForm = "both", timeout: float | None = None
    ) -> AsyncStream:
        """A stream of a request's output from token `next_index` on, whoever submitted it.

        Of all its choices, or of one alone when `request_id` is followed by `/` and its number, from 1. `timeout` is of the whole
        stream; without one it waits for a scheduler as long as a stream in mid-sentence does, see `RetryPolicy`.
        """

        def connect(progress: Progress, remaining_s: float | None) -> StreamCall:
            return self._attach(progress, output, remaining_s)

        return AsyncStream(self._transport, connect, Progress(request_id, next_index, accepted=True), timeout)

    async def submit(self, prompt: str | None = None, **options: Unpack[SubmitOptions]) -> Submitted:
        """Returns once the request is durable; it runs detached. Take up its output with `attach`."""
        options["request_id"] = options.get("request_id") or new_request_id()
        request = outgoing.submit(prompt, options)
        return incoming.submitted(await self._transport.call(self._stub.Submit, request, None))

    async def get_request(self, request_id: str, *, include_output: bool = False, timeout: float | None = None) -> RequestSnapshot:
        request = outgoing.get_request(request_id, include_output)
        return incoming.request_snapshot(await self._transport.call(self._stub.GetRequest, request, timeout))

    async def cancel(self, request_id: str, reason: str = "", *, timeout: float | None = None) -> Cancellation:
        """Cancelling an ended request changes nothing and says so."""
        request = outgoing.cancel(request_id, reason)
        return incoming.cancellation(await self._transport.call(self._stub.Cancel, request, timeout))

    async def tokenize(
        self, prompt: str | None = None, *, model: str = "", timeout: float | None = None, **forms: Unpack[PromptForms]
    ) -> Tokenized:
        """The token ids of a prompt in any of its forms: `prompt`, `messages` or `token_ids`."""
        request = outgoing.tokenize(prompt, model, forms)
        return incoming.tokenized(await self._transport.call(self._stub.Tokenize, request, timeout))

    async def list_models(self, *, timeout: float | None = None) -> tuple[Model, ...]:
        response = await self._transport.call(self._stub.ListModels, outgoing.list_models(), timeout)
        return tuple(incoming.model(model) for model in response.models)

    async def wait_ready(self, timeout: float = 60.0) -> None:
        """Returns when the scheduler accepts requests, which needs an executor. Raises Unavailable when the time is over."""
        deadline_s = time.monotonic() + timeout
        while (remaining_s := deadline_s - time.monotonic()) > 0:
            if await self.is_serving(_SERVICE, timeout=remaining_s):
                return
            await asyncio.sleep(min(0.1, remaining_s))
        raise Unavailable(f"The scheduler at {self.address} was not ready within {timeout:g} s: does it run, and its executor too?")

    async def is_serving(self, service: str = "", *, timeout: float = 5.0) -> bool:
        """What the server's health service says of `service`, of the whole server without one. False when nothing answers."""
        check = self._transport.channel.unary_unary(health.CHECK, None, None)
        address = self._transport.current
        try:
            serving = health.is_serving(await check(health.check_request(service), timeout=timeout))
        except grpc.aio.AioRpcError:
            serving = False
        if not serving:
            self._transport.leave(address)
        return serving

    @property
    def _stub(self) -> inference_pb2_grpc.InferenceServiceAsyncStub:
        return inference_pb2_grpc.InferenceServiceStub(self._transport.channel)

    def _attach(self, progress: Progress, output: OutputForm, timeout_s: float | None) -> StreamCall:
        request = outgoing.attach(progress.request_id, progress.next_indexes, output)
        return self._streams.open(request, timeout_s)
