"""`tokenmill.inference.v1.InferenceService`: what clients call, over a desk.

Methods raise what the desk and the intake raise; `errors.ErrorInterceptor` turns it into statuses and closes streams. Must not
know: the core, the ledger, executors.
"""

# ruff: noqa: N802 (methods are named by the protocol)
from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, asynccontextmanager
from typing import Any

from google.rpc.status_pb2 import Status
from tokenmill.inference.v1 import inference_pb2 as pb
from tokenmill.inference.v1.inference_pb2_grpc import InferenceServiceServicer

from tokenmill_scheduler.core.choices import choice_ids
from tokenmill_scheduler.core.request import TERMINAL, Request
from tokenmill_scheduler.desk.errors import Unavailable, UnknownModel
from tokenmill_scheduler.desk.port import Attachment, Desk
from tokenmill_scheduler.desk.records import RequestStatus, ServedModel
from tokenmill_scheduler.intake import Intake, Taken
from tokenmill_scheduler.intake.fields import read_next_indexes, read_reason, read_request_id
from tokenmill_scheduler.servicers import convert
from tokenmill_scheduler.servicers.auth import check_visible, claim
from tokenmill_scheduler.servicers.choices import R, stream_best, stream_choices, stream_one
from tokenmill_scheduler.servicers.events import EventWriter, wants_text, wants_token_ids
from tokenmill_scheduler.servicers.multiplex import CallEvent, Multiplexed
from tokenmill_scheduler.servicers.sizes import check_size
from tokenmill_scheduler.servicers.snapshots import Snapshots
from tokenmill_scheduler.servicers.statuses import reason_of, told_of
from tokenmill_scheduler.text.stream import TextStream

# Detokenising this many tokens takes about a millisecond; more goes to a thread.
_MANY_TOKENS = 2_000
_RETRY_S = 1.0


class InferenceServicer(InferenceServiceServicer):
    def __init__(
        self,
        desk: Desk,
        intake: Intake,
        refused: Callable[[str], None] = lambda reason: None,
        max_message_bytes: int = sys.maxsize,
    ) -> None:
        """For Multiplex alone: `refused` is told the reason of each submit that fails, and a request of more than
        `max_message_bytes` is refused. Of other calls `ErrorInterceptor` sees to both.
        """
        self._desk = desk
        self._intake = intake
        self._snapshots = Snapshots(desk, self._text_of)
        self._refused = refused
        self._max_message_bytes = max_message_bytes
        self._multiplexed: set[Multiplexed] = set()
        self._leaving: set[asyncio.Task[None]] = set()

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncGenerator[pb.GenerateResponse, None]:
        async with self._generated(request, pb.GenerateResponse) as responses:
            async for response in responses:
                yield response

    async def Submit(self, request: pb.SubmitRequest, context: Any) -> pb.SubmitResponse:
        claim(request.request)
        taken = await self._intake.take(request.request, detached=True)
        submitted = await self._desk.submit(taken.request, taken.payload_digest)
        return pb.SubmitResponse(request_id=submitted.request_id, prompt_tokens=len(taken.request.prompt), joined=submitted.joined)

    async def Attach(self, request: pb.AttachRequest, context: Any) -> AsyncGenerator[pb.AttachResponse, None]:
        async with self._attached(request, pb.AttachResponse) as responses:
            async for response in responses:
                yield response

    async def Multiplex(
        self, requests: AsyncIterator[pb.MultiplexRequest], context: Any
    ) -> AsyncGenerator[pb.MultiplexResponse, None]:
        # A client sends nothing before it knows that there is such a call.
        await context.send_initial_metadata(())
        multiplexed = Multiplexed(self._begin, self._tell)
        self._multiplexed.add(multiplexed)
        try:
            async with aclosing(multiplexed.run(requests)) as messages:
                async for message in messages:
                    yield message
        finally:
            self._multiplexed.discard(multiplexed)

    async def GetRequest(self, request: pb.GetRequestRequest, context: Any) -> pb.GetRequestResponse:
        status = await self._visible(request.request_id)
        return await self._snapshots.of(status, request.include_output)

    async def Cancel(self, request: pb.CancelRequest, context: Any) -> pb.CancelResponse:
        reason = read_reason(request.reason, "cancelled by the client")
        await self._visible(request.request_id)
        cancellation = await self._desk.cancel(request.request_id, reason)
        return pb.CancelResponse(state=convert.STATES[cancellation.state], already_ended=cancellation.already_ended)

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        model, token_ids = await self._intake.tokenize(request.model, request.prompt)
        return pb.TokenizeResponse(token_ids=token_ids, max_model_len=model.max_model_len)

    async def ListModels(self, request: pb.ListModelsRequest, context: Any) -> pb.ListModelsResponse:
        return pb.ListModelsResponse(models=[convert.model(model) for model in self._desk.models()])

    async def close_streams(self, reason: Unavailable) -> None:
        """Ends every stream that carries several calls with `reason` once these have ended."""
        await asyncio.gather(*[multiplexed.close(reason) for multiplexed in tuple(self._multiplexed)])

    def _begin(
        self, request: pb.MultiplexRequest, new: Callable[[], CallEvent]
    ) -> AbstractAsyncContextManager[AsyncGenerator[CallEvent, None]]:
        opening = request.generate if request.WhichOneof("action") == "generate" else request.attach
        check_size(opening, opening.ByteSize(), self._max_message_bytes)
        if request.WhichOneof("action") == "generate":
            return self._generated(request.generate, new)
        return self._attached(request.attach, new)

    def _tell(self, error: Exception, request: pb.MultiplexRequest, told: bool) -> Status:
        method = "Generate" if request.WhichOneof("action") == "generate" else "Attach"
        if method == "Generate" and not told:
            self._refused(reason_of(error))
        return told_of(error, method)

    @asynccontextmanager
    async def _generated(self, request: pb.GenerateRequest, new: Callable[[], R]) -> AsyncIterator[AsyncGenerator[R, None]]:
        """What is generated. To leave it closes the request's streams."""
        claim(request.request)
        taken = await self._intake.take(request.request, detached=request.request.detached)
        attachments = await self._open(taken)
        output = request.output if request.HasField("output") else None
        async with _closing(attachments), aclosing(self._stream(attachments, (), output, new)) as responses:
            yield responses

    @asynccontextmanager
    async def _attached(self, request: pb.AttachRequest, new: Callable[[], R]) -> AsyncIterator[AsyncGenerator[R, None]]:
        """As `_generated`, of a request that is there already."""
        output = request.output if request.HasField("output") else None
        wanted = (await self._visible(request.request_id)).stored.request
        next_indexes = read_next_indexes(request, wanted)
        if wants_text(output):
            # Unavailable until the model is known, as after a restart. Asked before a stream is opened: closing one again would
            # cancel a request that nobody else reads.
            self._model_of(wanted)
        attachments = await self._attach_choices(wanted, next_indexes)
        async with _closing(attachments), aclosing(self._stream(attachments, next_indexes, output, new)) as responses:
            yield responses

    def _stream(
        self,
        attachments: Sequence[Attachment],
        next_indexes: Sequence[int],
        output: pb.OutputOptions | None,
        new: Callable[[], R],
    ) -> AsyncGenerator[R, None]:
        """`next_indexes`, where there are several choices: of each that is given out; empty: 0."""
        request = attachments[0].request

        async def make_writer(choice: Request, earlier: tuple[int, ...], number: int) -> EventWriter:
            text = None
            if wants_text(output):
                text = self._model_of(choice).text.stream_of(choice)
                await _feed(text, earlier)
            return EventWriter(choice, len(earlier), text, wants_token_ids(output), number)

        if len(attachments) == 1:
            return stream_one(attachments[0], make_writer, new)
        if request.best_of > request.n:
            return stream_best(attachments, next_indexes or (0,) * request.n, make_writer, new)
        return stream_choices(attachments, make_writer, new)

    async def _open(self, taken: Taken) -> tuple[Attachment, ...]:
        """Submits and attaches as one: a client that goes in between must not leave a request behind that nobody reads."""
        opening = asyncio.ensure_future(self._submit_and_attach(taken))
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            leaving = asyncio.ensure_future(_close_once_open(opening))
            self._leaving.add(leaving)
            leaving.add_done_callback(self._leaving.discard)
            raise

    async def _submit_and_attach(self, taken: Taken) -> tuple[Attachment, ...]:
        await self._desk.submit(taken.request, taken.payload_digest)
        return await self._attach_choices(taken.request, ())

    async def _attach_choices(self, request: Request, next_indexes: Sequence[int]) -> tuple[Attachment, ...]:
        """To all choices of a request, or to the one that it is. Where the best are given out, those are known in the end."""
        choices = choice_ids(request)
        if len(choices) != len(next_indexes):
            next_indexes = (0,) * len(choices)
        return await self._desk.attach_all(dict(zip(choices, next_indexes, strict=True)))

    async def _visible(self, request_id: str) -> RequestStatus:
        """Of a request that the caller may know of. Raises InvalidArgument, UnknownRequest."""
        status = await self._desk.status(read_request_id(request_id))
        check_visible(status)
        return status

    def _model_of(self, request: Request) -> ServedModel:
        """Of one that was accepted, maybe by another scheduler. Raises Unavailable: one that has it can be asked."""
        try:
            return self._desk.model(request.model)
        except UnknownModel:
            raise Unavailable(f"model {request.model} is not served here now: ask again, or another scheduler", _RETRY_S) from None

    async def _text_of(self, status: RequestStatus, token_ids: tuple[int, ...]) -> str:
        """As a stream would have shown it by now."""
        request = status.stored.request
        text = self._model_of(request).text.stream_of(request)
        shown = await _feed(text, token_ids)
        return shown + text.finish() if status.stored.state in TERMINAL else shown


async def _close_once_open(opening: asyncio.Future[tuple[Attachment, ...]]) -> None:
    await asyncio.wait([opening])
    if opening.exception() is None:
        async with _closing(opening.result()):
            pass


@asynccontextmanager
async def _closing(attachments: Sequence[Attachment]) -> AsyncIterator[None]:
    """Every one, whatever happens at another."""
    async with AsyncExitStack() as stack:
        for attachment in attachments:
            stack.push_async_callback(attachment.chunks.aclose)
        yield


async def _feed(text: TextStream, token_ids: tuple[int, ...]) -> str:
    step = await asyncio.to_thread(text.feed, token_ids) if len(token_ids) > _MANY_TOKENS else text.feed(token_ids)
    return step.text
