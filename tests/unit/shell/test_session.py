"""A session and a link against an executor that follows a script, over a real connection: what ends an epoch, and how."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import grpc
import pytest
from tokenmill.executor.v1 import executor_pb2 as pb
from tokenmill.executor.v1 import executor_pb2_grpc
from tokenmill_scheduler.core.plans import Blocks, Plan, Result
from tokenmill_scheduler.ledger.errors import ExecutorTaken
from tokenmill_scheduler.link import FIRST_BACKOFF_S, MAX_BACKOFF_S, Backoff, ExecutorLink, Refused
from tokenmill_scheduler.session import Fenced, Session, SessionLimits, SessionLost
from tokenmill_scheduler.wire import ExecutorFacts, Standing, facts

# Far beyond what a test waits for, but where a test says otherwise.
PATIENT = SessionLimits(step_timeout_s=60, heartbeat_timeout_s=60, greeting_timeout_s=60)
EPOCH = 7
BLOCKS = pb.Blocks(free=7, cached=3)
Script: TypeAlias = Callable[[AsyncIterator[pb.RunRequest], Any], Awaitable[None]]


class ScriptedExecutor(executor_pb2_grpc.ExecutorServiceServicer):
    def __init__(self, script: Script) -> None:
        self.script = script
        self.runs = 0

    async def Describe(self, request: pb.DescribeRequest, context: Any) -> pb.DescribeResponse:  # noqa: N802
        return pb.DescribeResponse(
            name="x",
            model="m",
            vocab_size=50,
            max_model_len=8,
            block_size=4,
            num_blocks=10,
            max_num_seqs=2,
            max_num_batched_tokens=16,
            pipeline_depth=2,
            epoch=EPOCH - 1,
        )

    async def GetTokenizer(self, request: Any, context: Any) -> AsyncIterator[pb.GetTokenizerResponse]:  # noqa: N802
        raise AssertionError("every owner here knows the tokenizer")
        yield

    async def Run(self, requests: AsyncIterator[pb.RunRequest], context: Any) -> None:  # type: ignore[override]  # noqa: N802
        self.runs += 1
        await self.script(requests, context)


async def welcome(requests: AsyncIterator[pb.RunRequest], context: Any, epoch: int = EPOCH) -> None:
    assert (await anext(requests)).HasField("hello")
    await context.write(pb.RunResponse(welcome=pb.Welcome(epoch=epoch, blocks=BLOCKS, stored=[5, 6])))


async def answer(context: Any, plan_id: int, epoch: int = EPOCH) -> None:
    await context.write(pb.RunResponse(result=pb.Result(epoch=epoch, plan_id=plan_id, blocks=BLOCKS)))


@asynccontextmanager
async def scripted(script: Script) -> AsyncIterator[tuple[ScriptedExecutor, str]]:
    server = grpc.aio.server()
    servicer = ScriptedExecutor(script)
    executor_pb2_grpc.add_ExecutorServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield servicer, f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


@asynccontextmanager
async def session_with(script: Script, limits: SessionLimits = PATIENT) -> AsyncIterator[Session]:
    async with scripted(script) as (_, address), grpc.aio.insecure_channel(address) as channel:
        stub: Any = executor_pb2_grpc.ExecutorServiceStub(channel)
        yield Session(stub, EPOCH, facts(await stub.Describe(pb.DescribeRequest())), limits)


def plan(plan_id: int) -> Plan:
    return Plan(EPOCH, plan_id, (), (), (), ())


async def forever(requests: AsyncIterator[pb.RunRequest], context: Any) -> None:
    async for _ in requests:
        pass


# ---- greeting ------------------------------------------------------------------------------------------------------------------


async def test_the_welcome_tells_the_blocks_and_what_is_cached() -> None:
    async def script(requests: AsyncIterator[pb.RunRequest], context: Any) -> None:
        await welcome(requests, context)
        await forever(requests, context)

    async with session_with(script) as session:
        assert await session.greet() == Standing(Blocks(7, 3, 0), (5, 6))


async def test_a_welcome_to_another_epoch_is_no_welcome() -> None:
    async def script(requests: AsyncIterator[pb.RunRequest], context: Any) -> None:
        await welcome(requests, context, epoch=3)

    async with session_with(script) as session:
        with pytest.raises(SessionLost, match="welcomed to epoch 3 instead of 7"):
            await session.greet()


async def test_a_welcome_with_more_blocks_than_were_described_is_no_welcome() -> None:
    async def script(requests: AsyncIterator[pb.RunRequest], context: Any) -> None:
        await context.write(pb.RunResponse(welcome=pb.Welcome(epoch=EPOCH, blocks=pb.Blocks(free=11))))

    async with session_with(script) as session:
        with pytest.raises(SessionLost, match="the Welcome tells of 11 blocks, there are 10"):
            await session.greet()


async def test_an_epoch_too_low_is_told_with_its_reason() -> None:
    async def script(requests: AsyncIterator[pb.RunRequest], context: Any) -> None:
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "the highest seen is 9")

    async with session_with(script) as session:
        with pytest.raises(SessionLost, match="FAILED_PRECONDITION: the highest seen is 9"):
            await session.greet()


async def test_no_welcome_in_time() -> None:
    limits = SessionLimits(60, 60, greeting_timeout_s=0.05)
    async with session_with(forever, limits) as session:
        with pytest.raises(SessionLost, match=r"no Welcome within 0\.05 s"):
            await session.greet()


# ---- serving -------------------------------------------------------------------------------------------------------------------


async def test_plans_go_out_and_results_come_in_until_goodbye() -> None:
    heard: list[str] = []

    async def script(requests: AsyncIterator[pb.RunRequest], context: Any) -> None:
        await welcome(requests, context)
        async for request in requests:
            heard.append(str(request.WhichOneof("message")))
            if request.HasField("goodbye"):
                return
            await context.write(pb.RunResponse(heartbeat=pb.Heartbeat()))
            await answer(context, request.plan.plan_id)

    answered: list[int] = []

    async with session_with(script) as session:

        def on_result(result: Result) -> None:
            answered.append(result.plan_id)
            if result.plan_id == 3:
                session.leave()
            elif result.plan_id == 1:
                session.send(plan(3))

        await session.greet()
        session.send(plan(1))
        session.send(plan(2))
        await session.serve(on_result)
    assert answered == [1, 2, 3]
    assert heard == ["plan", "plan", "plan", "goodbye"]


async def serve_until_lost(script: Script, limits: SessionLimits = PATIENT, *plans: Plan) -> str:
    async def after_welcome(requests: AsyncIterator[pb.RunRequest], context: Any) -> None:
        await welcome(requests, context)
        await script(requests, context)

    async with session_with(after_welcome, limits) as session:
        await session.greet()
        for sent in plans:
            session.send(sent)
        with pytest.raises(SessionLost) as lost:
            await session.serve(lambda result: None)
    return str(lost.value)


async def test_a_stream_that_ends_without_goodbye_is_lost() -> None:
    async def script(requests: AsyncIterator[pb.RunRequest], context: Any) -> None:
        return

    assert await serve_until_lost(script) == "the executor ended the stream"


async def test_a_broken_stream_is_lost() -> None:
    async def script(requests: AsyncIterator[pb.RunRequest], context: Any) -> None:
        await context.abort(grpc.StatusCode.UNAVAILABLE, "shutting down")

    assert await serve_until_lost(script) == "UNAVAILABLE: shutting down"


async def test_c40_a_silent_executor_is_lost() -> None:
    limits = SessionLimits(step_timeout_s=60, heartbeat_timeout_s=0.2)
    assert await serve_until_lost(forever, limits) == "no heartbeat for 0.2 s"


async def test_c42_a_long_step_is_not_lost_before_the_step_timeout() -> None:
    beats = 0

    async def script(requests: AsyncIterator[pb.RunRequest], context: Any) -> None:
        nonlocal beats
        while True:
            await context.write(pb.RunResponse(heartbeat=pb.Heartbeat(running_plan_id=1)))
            beats += 1
            await asyncio.sleep(0.02)

    limits = SessionLimits(step_timeout_s=1.5, heartbeat_timeout_s=1.2)
    assert await serve_until_lost(script, limits, plan(1)) == "plan 1 is unanswered after 1.5 s"
    assert beats > 5


@pytest.mark.parametrize(("plan_id", "epoch"), [(2, EPOCH), (1, EPOCH - 1)])
async def test_an_answer_to_something_else_breaks_the_protocol(plan_id: int, epoch: int) -> None:
    async def script(requests: AsyncIterator[pb.RunRequest], context: Any) -> None:
        await anext(requests)
        await answer(context, plan_id, epoch)
        await forever(requests, context)

    reason = await serve_until_lost(script, PATIENT, plan(1))
    assert reason == f"plan {plan_id} of epoch {epoch} was answered where plan 1 of epoch {EPOCH} is next"


async def test_c74_a_session_that_a_higher_epoch_ended_is_fenced() -> None:
    async def script(requests: AsyncIterator[pb.RunRequest], context: Any) -> None:
        await welcome(requests, context)
        await context.abort(grpc.StatusCode.ABORTED, "a scheduler with epoch 8 has taken over")

    async with session_with(script) as session:
        await session.greet()
        with pytest.raises(Fenced, match="epoch 8 has taken over"):
            await session.serve(lambda result: None)


async def test_a_bug_of_whoever_takes_results_comes_out() -> None:
    async def script(requests: AsyncIterator[pb.RunRequest], context: Any) -> None:
        await welcome(requests, context)
        await anext(requests)
        await answer(context, 1)
        await forever(requests, context)

    def taker(result: Result) -> None:
        raise ZeroDivisionError

    async with session_with(script) as session:
        await session.greet()
        session.send(plan(1))
        with pytest.raises(ZeroDivisionError):
            await session.serve(taker)


# ---- link ----------------------------------------------------------------------------------------------------------------------


class Owner:
    """A `LinkOwner` that writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.changed = asyncio.Event()
        self.epoch = EPOCH - 1
        # Whether another scheduler on the same database drives the executor.
        self.taken = False

    def claim(self, link: ExecutorLink, facts: ExecutorFacts) -> None:
        if self.epoch < 0:
            raise Refused("not today")

    def unclaim(self, link: ExecutorLink) -> None: ...

    async def next_epoch(self, link: ExecutorLink, facts: ExecutorFacts) -> int:
        if self.taken:
            self._tell("taken")
            raise ExecutorTaken("another drives it")
        self.epoch = max(self.epoch + 1, facts.epoch + 1)
        return self.epoch

    def knows_tokenizer(self, digest: str) -> bool:
        return True

    async def learn_tokenizer(self, digest: str, files: dict[str, bytes]) -> None: ...

    def joined(self, link: ExecutorLink, facts: ExecutorFacts, epoch: int, standing: Standing) -> None:
        self._tell(f"joined {facts.description.name} in epoch {epoch}")

    def answered(self, link: ExecutorLink, result: Result) -> None: ...

    def lost(self, link: ExecutorLink, reason: str, lives: bool) -> None:
        self._tell(f"{'given up' if lives else 'lost'}: {reason}")

    async def fenced(self, name: str, reason: str) -> bool:
        self._tell(f"fenced: {reason}")
        return not self.taken

    def _tell(self, words: str) -> None:
        self.told.append(words)
        self.changed.set()

    async def until(self, count: int) -> None:
        while len(self.told) < count:
            self.changed.clear()
            await self.changed.wait()


async def test_a_link_connects_again_with_a_new_epoch_and_says_goodbye() -> None:
    async def script(requests: AsyncIterator[pb.RunRequest], context: Any) -> None:
        hello = await anext(requests)
        await context.write(pb.RunResponse(welcome=pb.Welcome(epoch=hello.hello.epoch, blocks=BLOCKS)))
        if hello.hello.epoch > EPOCH:
            assert (await anext(requests)).HasField("goodbye")

    owner = Owner()
    async with scripted(script) as (_, address):
        link = ExecutorLink(address, owner, PATIENT, 1 << 20)
        running = asyncio.create_task(link.run())
        await owner.until(3)
        link.leave()
        await running
    assert owner.told == [
        "joined x in epoch 7",
        "lost: the executor ended the stream",
        "joined x in epoch 8",
        "given up: goodbye",
    ]


async def test_nothing_of_a_lost_session_goes_on() -> None:
    """gRPC's own task that asks for requests among it: the garbage collector would break it off, with words in the log."""
    before = asyncio.all_tasks()
    owner = Owner()
    async with scripted(welcome) as (_, address):
        link = ExecutorLink(address, owner, PATIENT, 1 << 20)
        running = asyncio.create_task(link.run())
        await owner.until(2)
        link.leave()
        await running
    assert owner.told[:2] == ["joined x in epoch 7", "lost: the executor ended the stream"]
    async with asyncio.timeout(10):
        await asyncio.gather(*(asyncio.all_tasks() - before), return_exceptions=True)


async def fence(requests: AsyncIterator[pb.RunRequest], context: Any) -> None:
    await welcome(requests, context)
    await context.abort(grpc.StatusCode.ABORTED, "epoch 8")


async def test_a_link_fenced_by_a_scheduler_of_another_database_gives_up() -> None:
    owner = Owner()
    async with scripted(fence) as (servicer, address):
        await ExecutorLink(address, owner, PATIENT, 1 << 20).run()
    assert owner.told == ["joined x in epoch 7", "fenced: epoch 8", "given up: epoch 8"]
    assert servicer.runs == 1


async def test_an_inherited_executor_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    owner = Owner()

    async def fenced(name: str, reason: str) -> bool:
        owner.taken = True
        return False

    monkeypatch.setattr(owner, "fenced", fenced)
    async with scripted(fence) as (servicer, address):
        await ExecutorLink(address, owner, PATIENT, 1 << 20, inherited=True).run()
    assert owner.told == ["joined x in epoch 7", "given up: epoch 8", "taken"]
    assert servicer.runs == 1


async def test_a_link_stands_by_while_another_scheduler_drives_and_hurries_when_told() -> None:
    async def script(requests: AsyncIterator[pb.RunRequest], context: Any) -> None:
        await welcome(requests, context)
        assert (await anext(requests)).HasField("goodbye")

    owner = Owner()
    owner.taken = True
    async with scripted(script) as (servicer, address):
        link = ExecutorLink(address, owner, PATIENT, 1 << 20)
        running = asyncio.create_task(link.run())
        await owner.until(1)
        assert servicer.runs == 0
        owner.taken = False
        link.hurry()
        await owner.until(2)
        link.leave()
        await running
    assert owner.told == ["taken", "joined x in epoch 7", "given up: goodbye"]


def test_backoff_doubles_to_a_bound_with_jitter() -> None:
    backoff = Backoff(random.Random(1))
    waits = [backoff.next_s() for _ in range(10)]
    for attempt, wait_s in enumerate(waits):
        full_s = min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2**attempt)
        assert full_s / 2 <= wait_s <= full_s
    assert len(set(waits[-3:])) == 3
    backoff.reset()
    assert backoff.next_s() <= FIRST_BACKOFF_S
