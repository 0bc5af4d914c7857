"""One Run stream, which is one epoch: plans in, results and heartbeats out, until somebody ends it.

Must not know: other sessions, what an engine does with a plan. The data's way:

    stream → _read → engine's queue (at most pipeline_depth) → engine's thread → _answered → outbox → _write → stream

A session ends once, by whoever says so first: its scheduler's goodbye or disappearance, a bad plan, a higher epoch, a shutdown.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass
from typing import Any

import grpc
import structlog
from tokenmill.executor.v1 import executor_pb2 as pb

from tokenmill_executor.engine_thread import Answer, EngineThread
from tokenmill_executor.records import Plan, SequenceFault, Standing
from tokenmill_executor.runner import DeviceLost
from tokenmill_executor.wire import BadPlan, PlanLimits, decode_plan, encode_result, encode_welcome

Context = grpc.aio.ServicerContext[pb.RunRequest, pb.RunResponse]

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Ending:
    """How a session ended; OK after a goodbye, and when the scheduler is gone and nobody reads the code."""

    code: grpc.StatusCode
    detail: str


class Session:
    def __init__(
        self, epoch: int, thread: EngineThread, limits: PlanLimits, pipeline_depth: int, heartbeat_interval_s: float
    ) -> None:
        self.epoch = epoch
        self._thread = thread
        self._limits = limits
        self._pipeline_depth = pipeline_depth
        self._heartbeat_interval_s = heartbeat_interval_s
        # None, put there by the end, wakes the writer.
        self._outbox: asyncio.Queue[pb.RunResponse | None] = asyncio.Queue()
        self._writer: asyncio.Task[None] | None = None
        self._ending: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()
        # Ends the session once every plan before it is answered and the answers are written.
        self._leaving: Ending | None = None
        self._received_plan_id = 0
        self._answered_plan_id = 0
        self._sent_plan_id = 0
        self._written_plan_id = 0
        self._begun_plan_id = 0
        self._log = log.bind(epoch=epoch)

    @property
    def ended(self) -> bool:
        """May be asked on any thread."""
        return self._ending.done()

    def end(self, code: grpc.StatusCode, detail: str) -> None:
        """Ends it now: plans that have not begun are never carried out. The first ending counts."""
        if not self._ending.done():
            self._ending.set_result(Ending(code, detail))
            self._outbox.put_nowait(None)

    def leave(self, code: grpc.StatusCode, detail: str) -> None:
        """Ends it in good order: takes no more plans, answers those it has."""
        if self._leaving is None:
            self._leaving = Ending(code, detail)
            self._end_if_left()

    async def serve(self, requests: AsyncIterator[pb.RunRequest], context: Context, standing: Standing) -> Ending:
        """Talks to the scheduler until the session ends; `standing` is what the welcome tells. Await `written` afterwards."""
        self._outbox.put_nowait(encode_welcome(self.epoch, standing))
        self._writer = self._start(self._write(context))
        tasks = [self._start(self._read(requests)), self._start(self._beat())]
        try:
            return await self._ending
        finally:
            for task in tasks:
                task.cancel()

    async def written(self) -> None:
        """Returns once no write is in progress, which a scheduler that does not read can hold up for long.

        gRPC lets a handler send its status only then: a write that is cancelled goes on inside, and the status fails.
        """
        if self._writer is not None:
            await asyncio.wait([self._writer])

    def _start(self, part: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(part)
        task.add_done_callback(self._stopped)
        return task

    def _stopped(self, task: asyncio.Task[None]) -> None:
        """Without one of its tasks a session is dead, and must not look alive."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._log.error("session task failed", exc_info=error)
            self.end(grpc.StatusCode.INTERNAL, "the executor failed in this stream; see its log")

    # ---- in --------------------------------------------------------------------------------------------------------------------

    async def _read(self, requests: AsyncIterator[pb.RunRequest]) -> None:
        async for request in requests:
            self._received(request)
            if self.ended or self._leaving is not None:
                return
        # The same for a half-close and a dead peer: only a goodbye is a goodbye.
        self.end(grpc.StatusCode.OK, "the scheduler is gone")

    def _received(self, request: pb.RunRequest) -> None:
        if self._leaving is not None:
            return
        match request.WhichOneof("message"):
            case "plan":
                self._received_plan(request.plan)
            case "goodbye":
                self.leave(grpc.StatusCode.OK, "goodbye")
            case "hello":
                self.end(grpc.StatusCode.INVALID_ARGUMENT, "hello came twice")
            case None:
                self.end(grpc.StatusCode.INVALID_ARGUMENT, "message is empty, or of a later version")

    def _received_plan(self, message: pb.Plan) -> None:
        if self._received_plan_id - self._sent_plan_id >= self._pipeline_depth:
            detail = f"plan {message.plan_id} came while {self._pipeline_depth} were unanswered, pipeline_depth is no more"
            self.end(grpc.StatusCode.RESOURCE_EXHAUSTED, detail)
            return
        try:
            plan = decode_plan(message, self.epoch, self._received_plan_id + 1, self._limits)
        except BadPlan as error:
            self.end(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            return
        self._received_plan_id = plan.plan_id
        answer = self._thread.carry_out(plan, lambda: not self.ended, self._began)
        answer.add_done_callback(self._answered)

    # ---- out -------------------------------------------------------------------------------------------------------------------

    def _began(self, plan: Plan) -> None:
        # On the engine's thread: one assignment, so that the heartbeat may read it.
        self._begun_plan_id = plan.plan_id

    def _answered(self, future: asyncio.Future[Answer | None]) -> None:
        if future.cancelled():
            return
        if (error := future.exception()) is not None:
            plan_id = self._answered_plan_id + 1
            self._log.error("plan failed", plan=plan_id, exc_info=error)
            if isinstance(error, DeviceLost):
                self.end(grpc.StatusCode.UNAVAILABLE, "the executor has lost its device and ends")
            else:
                self.end(grpc.StatusCode.INTERNAL, f"plan {plan_id} failed in the engine; see the executor's log")
            return
        answer = future.result()
        if answer is None or self.ended:
            return
        result = answer.result
        self._answered_plan_id = result.plan_id
        for fault in result.faults:
            if fault.fault is SequenceFault.ERROR:
                self._log.warning("sequence failed", plan=result.plan_id, sequence=fault.sequence_id, reason=fault.detail)
        self._outbox.put_nowait(encode_result(result, answer.times))

    async def _write(self, context: Context) -> None:
        while (response := await self._outbox.get()) is not None and not self.ended:
            # Before the write: a plan that answers this result must not find it still counted as out.
            if response.HasField("result"):
                self._sent_plan_id = response.result.plan_id
            try:
                await context.write(response)
            except grpc.aio.BaseError:
                self.end(grpc.StatusCode.OK, "the scheduler is gone")
                return
            self._written_plan_id = self._sent_plan_id
            self._end_if_left()

    def _end_if_left(self) -> None:
        if self._leaving is not None and self._written_plan_id == self._received_plan_id and self._outbox.empty():
            self.end(self._leaving.code, self._leaving.detail)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._heartbeat_interval_s)
            # A scheduler that does not read needs no second heartbeat: the outbox stays bounded.
            if self._outbox.empty():
                running = self._begun_plan_id if self._begun_plan_id > self._answered_plan_id else 0
                beat = pb.Heartbeat(answered_plan_id=self._answered_plan_id, running_plan_id=running)
                self._outbox.put_nowait(pb.RunResponse(heartbeat=beat))
