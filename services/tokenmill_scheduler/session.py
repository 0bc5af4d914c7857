"""One epoch with one executor: a Run stream, from Hello to its end. Plans go in, results come out, in order.

Must not know: the core, requests, the ledger, how the connection came about.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc
from tokenmill.executor.v1 import executor_pb2 as pb

from tokenmill_scheduler import wire
from tokenmill_scheduler.core.plans import Plan, Result
from tokenmill_scheduler.result_check import ResultCheck

if TYPE_CHECKING:
    # Only the stubs for type checkers tell asyncio's stub from the blocking one.
    from tokenmill.executor.v1.executor_pb2_grpc import ExecutorServiceAsyncStub


class SessionLost(Exception):
    """The executor cannot be reached, is silent, or broke the protocol; the epoch is over. The text says why."""


class Fenced(Exception):
    """Another scheduler took this executor with a higher epoch."""


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """`step_timeout_s`: how long one plan may take. `heartbeat_timeout_s`: how long the stream may be silent."""

    step_timeout_s: float = 60.0
    heartbeat_timeout_s: float = 10.0
    greeting_timeout_s: float = 10.0


class Session:
    def __init__(self, stub: ExecutorServiceAsyncStub, epoch: int, facts: wire.ExecutorFacts, limits: SessionLimits) -> None:
        self.epoch = epoch
        self._limits = limits
        self._codec = wire.Codec()
        self._result_check = ResultCheck(facts)
        self._outbox: deque[pb.RunRequest] = deque([pb.RunRequest(hello=pb.Hello(epoch=epoch))])
        self._posted = asyncio.Event()
        self._posted.set()
        self._call = stub.Run(self._requests())
        self._plans_out: deque[Plan] = deque()
        self._leaving = self._over = False
        self._heard_s = self._waiting_since_s = _now()

    async def greet(self) -> wire.Standing:
        """Awaits the answer to Hello. Returns how things stand now that the executor is ours. Raises SessionLost."""
        try:
            async with asyncio.timeout(self._limits.greeting_timeout_s):
                message = await self._call.read()
        except TimeoutError:
            raise SessionLost(f"no Welcome within {self._limits.greeting_timeout_s:g} s") from None
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise SessionLost(describe_error(error)) from None
        if not isinstance(message, pb.RunResponse) or message.WhichOneof("message") != "welcome":
            raise SessionLost("the first answer is no Welcome")
        if message.welcome.epoch != self.epoch:
            raise SessionLost(f"welcomed to epoch {message.welcome.epoch} instead of {self.epoch}")
        standing = wire.standing(message.welcome)
        if trouble := self._result_check.check_blocks(standing.blocks):
            raise SessionLost(f"the Welcome {trouble}")
        self._heard_s = _now()
        return standing

    def send(self, plan: Plan) -> None:
        """Returns at once; plans leave in this order."""
        if not self._plans_out:
            self._waiting_since_s = _now()
        self._plans_out.append(plan)
        self._result_check.sent(plan)
        self._post(self._codec.encode(plan))

    def leave(self) -> None:
        """Says goodbye: `serve` returns when the executor has answered what is out and ended the stream."""
        self._leaving = True
        self._post(pb.RunRequest(goodbye=pb.Goodbye()))

    async def serve(self, answered: Callable[[Result], None]) -> None:
        """Carries plans and results until the session ends. Raises SessionLost or Fenced, unless it ended after `leave`."""
        tasks = [asyncio.create_task(self._read(answered)), asyncio.create_task(self._watch())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def end(self) -> None:
        """Whatever has ended it: nothing more goes out. gRPC goes on asking for requests when a call is over, so those end, too."""
        self._call.cancel()
        self._over = True
        self._posted.set()

    def _post(self, message: pb.RunRequest) -> None:
        self._outbox.append(message)
        self._posted.set()

    async def _requests(self) -> AsyncIterator[pb.RunRequest]:
        while not self._over:
            await self._posted.wait()
            self._posted.clear()
            while self._outbox:
                yield self._outbox.popleft()

    async def _read(self, answered: Callable[[Result], None]) -> None:
        # One task reads for the stream's whole life: cancelling a single read would cancel the call.
        try:
            while isinstance(message := await self._call.read(), pb.RunResponse):
                self._heard_s = _now()
                if message.WhichOneof("message") == "result":
                    answered(self._result(message.result))
        except wire.ProtocolError as error:
            raise SessionLost(str(error)) from None
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.ABORTED:
                raise Fenced(error.details() or "a higher epoch") from None
            raise SessionLost(describe_error(error)) from None
        if not self._leaving:
            raise SessionLost("the executor ended the stream")

    def _result(self, message: pb.Result) -> Result:
        result = self._codec.decode(message)
        if result.epoch != self.epoch or not self._plans_out or result.plan_id != self._plans_out[0].plan_id:
            out = f"plan {self._plans_out[0].plan_id} of epoch {self.epoch}" if self._plans_out else "no plan"
            raise wire.ProtocolError(f"plan {result.plan_id} of epoch {result.epoch} was answered where {out} is next")
        plan = self._plans_out.popleft()
        self._result_check.check(plan, result, uncut=bool(self._plans_out) and self._plans_out[0].after_all_steps)
        self._waiting_since_s = self._heard_s
        return result

    async def _watch(self) -> None:
        interval_s = min(self._limits.step_timeout_s, self._limits.heartbeat_timeout_s) / 8
        while True:
            slept_from_s = _now()
            await asyncio.sleep(interval_s)
            now_s = _now()
            if now_s - slept_from_s > 2 * interval_s:
                continue  # It was us who stood still; what the executor sent meanwhile is not read yet.
            if now_s - self._heard_s > self._limits.heartbeat_timeout_s:
                raise SessionLost(f"no heartbeat for {self._limits.heartbeat_timeout_s:g} s")
            if self._plans_out and now_s - self._waiting_since_s > self._limits.step_timeout_s:
                raise SessionLost(f"plan {self._plans_out[0].plan_id} is unanswered after {self._limits.step_timeout_s:g} s")


def describe_error(error: Exception) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        details = error.details() or ""
        hangs_up = "failed to connect" in details and "Socket closed" in details
        hint = " (does it want TLS, or another certificate? see --executor-tls-ca)" if hangs_up else ""
        return f"{error.code().name}: {details}{hint}"
    return str(error) or type(error).__name__


def _now() -> float:
    return asyncio.get_running_loop().time()
