"""ExecutorService: describes the executor, hands out the tokenizer, and sees to it that one scheduler drives it.

Must not know: how plans are carried out. All of it runs on one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field

import grpc
import structlog
from tokenmill.executor.v1 import executor_pb2 as pb
from tokenmill.executor.v1 import executor_pb2_grpc

from tokenmill_executor.engine_thread import EngineThread
from tokenmill_executor.records import Standing
from tokenmill_executor.session import Context, Session
from tokenmill_executor.wire import PlanLimits

log = structlog.get_logger(__name__)

# Well below gRPC's default limit of 4 MiB, which clients keep.
_PIECE_BYTES = 512 * 1024
_CLOSING = "the executor is shutting down"
_LOADING = "the model is still loading"


@dataclass(frozen=True, slots=True)
class Offer:
    """What the executor offers once its model is loaded. `description` lacks the epoch; `tokenizer_files` are by name."""

    description: pb.DescribeResponse
    tokenizer_files: Mapping[str, bytes] = field(default_factory=dict)


def tokenizer_digest(files: Mapping[str, bytes]) -> str:
    """Hex SHA-256 over names and contents, in the order of the names."""
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(f"{name}\0{len(files[name])}\0".encode())
        digest.update(files[name])
    return digest.hexdigest()


class ExecutorServicer(executor_pb2_grpc.ExecutorServiceServicer):
    def __init__(self, thread: EngineThread, heartbeat_interval_s: float = 1.0) -> None:
        self._thread = thread
        self._heartbeat_interval_s = heartbeat_interval_s
        self._offer: Offer | None = None
        self._loaded = asyncio.Event()
        self._epoch = 0
        self._session: Session | None = None
        self._closing = False
        # Set when the engine's books are wrong or its device is lost: it must not serve any more.
        self.failed = asyncio.Event()
        self._no_session = asyncio.Event()
        self._no_session.set()

    def open(self, offer: Offer) -> None:
        """The model is loaded: from now on it is described and driven."""
        self._offer = offer
        self._loaded.set()

    async def close(self, timeout_s: float) -> None:
        """Shutting down: no new stream; the open one answers the plans it has, and ends, within `timeout_s` or not."""
        self._closing = True
        if self._session is not None:
            self._session.leave(grpc.StatusCode.UNAVAILABLE, _CLOSING)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.idle(), timeout_s)

    async def idle(self) -> None:
        """Returns once no scheduler drives this executor."""
        await self._no_session.wait()

    async def Describe(  # noqa: N802
        self, request: pb.DescribeRequest, context: grpc.aio.ServicerContext[pb.DescribeRequest, pb.DescribeResponse]
    ) -> pb.DescribeResponse:
        if self._offer is None:
            # Of the time that the caller gives, half: it joins at once if that is enough, and hears why if it is not.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._loaded.wait(), (context.time_remaining() or 0.0) / 2)
        if self._offer is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, _LOADING)
        response = pb.DescribeResponse(epoch=self._epoch)
        response.MergeFrom(self._offer.description)
        return response

    async def GetTokenizer(  # noqa: N802
        self, request: pb.GetTokenizerRequest, context: grpc.aio.ServicerContext[pb.GetTokenizerRequest, pb.GetTokenizerResponse]
    ) -> AsyncIterator[pb.GetTokenizerResponse]:
        if self._offer is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, _LOADING)
        for name, content in self._offer.tokenizer_files.items():
            for start in range(0, len(content), _PIECE_BYTES):
                yield pb.GetTokenizerResponse(name=name, content=content[start : start + _PIECE_BYTES])

    # The generated stubs know only handlers that yield; this one writes, from several tasks' doings.
    async def Run(  # type: ignore[override]  # noqa: N802
        self, request_iterator: AsyncIterator[pb.RunRequest], context: Context
    ) -> None:
        if self._offer is None or self._closing:
            await context.abort(grpc.StatusCode.UNAVAILABLE, _CLOSING if self._closing else _LOADING)
        request = await anext(request_iterator, None)
        if request is None or not request.HasField("hello"):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message must be hello")
        epoch = request.hello.epoch
        if epoch <= self._epoch:
            detail = f"hello.epoch is {epoch}, the highest seen is {self._epoch}: take a higher one"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, detail)
        session = self._begin(epoch)
        try:
            standing = await self._release_all()
            ending = await session.serve(request_iterator, context, standing)
        finally:
            self._finish(session)
        log.info("session ended", epoch=epoch, code=ending.code.name, reason=ending.detail)
        await session.written()
        if ending.code is not grpc.StatusCode.OK:
            await context.abort(ending.code, ending.detail)

    def _begin(self, epoch: int) -> Session:
        """Makes this epoch the one that counts, and fences out the one before."""
        assert self._offer is not None
        description = self._offer.description
        limits = PlanLimits(description.max_num_seqs, description.max_num_batched_tokens)
        session = Session(epoch, self._thread, limits, description.pipeline_depth, self._heartbeat_interval_s)
        if self._session is not None:
            self._session.end(grpc.StatusCode.ABORTED, f"a scheduler with epoch {epoch} has taken over")
        self._epoch, self._session = epoch, session
        self._no_session.clear()
        log.info("session began", epoch=epoch)
        return session

    def _finish(self, session: Session) -> None:
        """Leaves nothing behind, however it ended: what a session holds is of no use to the next one."""
        # A handler that is cancelled has not ended its session yet, and its queued plans must not begin.
        session.end(grpc.StatusCode.CANCELLED, "the stream is gone")
        if self._session is session:
            self._session = None
            self._no_session.set()
            # Behind the step in progress, and ahead of whatever the next session asks.
            self._thread.release_all().add_done_callback(self._released)

    async def _release_all(self) -> Standing:
        released = self._thread.release_all()
        released.add_done_callback(self._released)
        # Shielded: cancelling the handler must not take the release out of the engine's queue.
        return await asyncio.shield(released)

    def _released(self, future: asyncio.Future[Standing]) -> None:
        if not future.cancelled() and (error := future.exception()) is not None:
            log.error("release failed", exc_info=error)
            self.failed.set()
