"""The way to one executor address: connects, describes, takes an epoch, carries plans, and connects again when lost.

Must not know: the core, requests, SQL. What it learns goes to its `LinkOwner`.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import Protocol

import grpc
import structlog
from tokenmill.executor.v1 import executor_pb2 as pb
from tokenmill.executor.v1 import executor_pb2_grpc as pb_grpc
from tokenmill_service.flags import SettingsError
from tokenmill_service.tls import ClientTls, channel_credentials

from tokenmill_scheduler import wire
from tokenmill_scheduler.core.plans import Plan, Result
from tokenmill_scheduler.ledger.errors import ExecutorTaken, LedgerError
from tokenmill_scheduler.session import Fenced, Session, SessionLimits, SessionLost, describe_error

CALL_TIMEOUT_S = 10.0
TOKENIZER_TIMEOUT_S = 120.0
FIRST_BACKOFF_S = 0.1
# An executor that is back does nothing until it is asked again: for requests that wait, this is all the time it takes.
MAX_BACKOFF_S = 1.0


class Refused(Exception):
    """The executor at this address does not fit beside those driven already. The text says why and what to do."""


class LinkOwner(Protocol):
    """Who drives the executor; called on the event loop's thread."""

    def claim(self, link: ExecutorLink, facts: wire.ExecutorFacts) -> None:
        """Keeps the executor's name for this link until `unclaim`. Raises Refused."""

    def unclaim(self, link: ExecutorLink) -> None: ...

    async def next_epoch(self, link: ExecutorLink, facts: wire.ExecutorFacts) -> int:
        """The executor is this scheduler's from here on. Raises ExecutorTaken where it is another's."""

    def knows_tokenizer(self, digest: str) -> bool: ...

    async def learn_tokenizer(self, digest: str, files: dict[str, bytes]) -> None:
        """Raises ValueError when they are no tokenizer."""

    def joined(self, link: ExecutorLink, facts: wire.ExecutorFacts, epoch: int, standing: wire.Standing) -> None: ...

    def answered(self, link: ExecutorLink, result: Result) -> None: ...

    def lost(self, link: ExecutorLink, reason: str, lives: bool) -> None:
        """Called once for each `joined`."""

    async def fenced(self, name: str, reason: str) -> bool:
        """Another scheduler drives this executor now. True if it must not be taken back."""


class Backoff:
    """Waits that double from FIRST_BACKOFF_S to MAX_BACKOFF_S, each shortened by up to half at random so that peers spread out."""

    def __init__(self, random_source: random.Random) -> None:
        self._random = random_source
        self._next_s = FIRST_BACKOFF_S

    def next_s(self) -> float:
        wait_s, self._next_s = self._next_s, min(MAX_BACKOFF_S, self._next_s * 2)
        return wait_s * self._random.uniform(0.5, 1.0)

    def reset(self) -> None:
        self._next_s = FIRST_BACKOFF_S


class ExecutorLink:
    def __init__(
        self,
        address: str,
        owner: LinkOwner,
        limits: SessionLimits,
        max_message_bytes: int,
        tls: ClientTls | None = None,
        inherited: bool = False,
    ) -> None:
        """An `inherited` executor is driven until a scheduler that was told of it does so."""
        self.address = address
        self.inherited = inherited
        self._owner = owner
        self._limits = limits
        self._options = channel_options(max_message_bytes)
        self._tls = tls
        self._backoff = Backoff(random.Random())
        self._session: Session | None = None
        self._hurried = asyncio.Event()
        self.leaving = False
        self._log = structlog.get_logger(__name__).bind(address=address)

    async def run(self) -> None:
        """Keeps the executor driven until `leave`; an inherited one until another scheduler takes it."""
        last_trouble = ""
        while not self.leaving:
            try:
                await self._drive()
                last_trouble = ""
            except Fenced:
                return
            except ExecutorTaken as taken:
                if self.inherited:
                    self._log.info("executor given back", reason=str(taken))
                    return
                # To stand by for another scheduler is no trouble.
                log = self._log.debug if str(taken) == last_trouble else self._log.info
                last_trouble = str(taken)
                log("standing by", reason=last_trouble)
            except (SessionLost, Refused, LedgerError, wire.ProtocolError) as trouble:
                # The same trouble again is worth no new warning.
                log = self._log.debug if str(trouble) == last_trouble else self._log.warning
                last_trouble = str(trouble)
                log("executor not driven", reason=last_trouble)
            if not self.leaving:
                await self._pause(self._backoff.next_s())

    def hurry(self) -> None:
        """The executor can be driven from now on: no waiting for the next attempt."""
        self._hurried.set()

    async def _pause(self, seconds: float) -> None:
        # Not `wait_for`, which before Python 3.12 forgets that it was cancelled when the event comes at the same time.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._hurried.wait()
        self._hurried.clear()

    def send(self, plan: Plan) -> None:
        """Returns at once. A plan sent when the session is over is lost with it."""
        if self._session is not None:
            self._session.send(plan)

    def leave(self) -> None:
        """Says goodbye to the executor; `run` returns once it has answered what is out."""
        self.leaving = True
        if self._session is not None:
            self._session.leave()

    async def _drive(self) -> None:
        """One epoch, from connecting to its end."""
        try:
            await self._drive_on_channel()
        finally:
            self._owner.unclaim(self)

    async def _drive_on_channel(self) -> None:
        async with self._open_channel() as channel:
            stub: pb_grpc.ExecutorServiceAsyncStub = pb_grpc.ExecutorServiceStub(channel)
            try:
                facts = wire.facts(await stub.Describe(pb.DescribeRequest(), timeout=CALL_TIMEOUT_S))
                self._owner.claim(self, facts)
                await self._learn_tokenizer(stub, facts.tokenizer_digest)
            except (grpc.aio.AioRpcError, ValueError) as error:
                raise SessionLost(describe_error(error)) from None
            epoch = await self._owner.next_epoch(self, facts)
            session = Session(stub, epoch, facts, self._limits)
            try:
                standing = await session.greet()
                await self._serve(session, facts, standing)
            finally:
                session.end()

    def _open_channel(self) -> grpc.aio.Channel:
        if self._tls is None or self.address.startswith("unix:"):
            return grpc.aio.insecure_channel(self.address, options=self._options)
        try:
            credentials = channel_credentials(self._tls)
        except SettingsError as error:
            raise SessionLost(str(error)) from error
        return grpc.aio.secure_channel(self.address, credentials, options=self._options)

    async def _learn_tokenizer(self, stub: pb_grpc.ExecutorServiceAsyncStub, digest: str) -> None:
        if not self._owner.knows_tokenizer(digest):
            pieces = [piece async for piece in stub.GetTokenizer(pb.GetTokenizerRequest(), timeout=TOKENIZER_TIMEOUT_S)]
            await self._owner.learn_tokenizer(digest, wire.tokenizer_files(pieces))

    async def _serve(self, session: Session, facts: wire.ExecutorFacts, standing: wire.Standing) -> None:
        self._backoff.reset()
        self._session = session
        self._owner.joined(self, facts, session.epoch, standing)
        if self.leaving:
            session.leave()
        reason, lives = "goodbye", True
        try:
            await session.serve(lambda result: self._owner.answered(self, result))
        except SessionLost as lost:
            reason, lives = str(lost), False
            raise
        except Fenced as fence:
            reason = str(fence)
            if await self._owner.fenced(facts.description.name, reason):
                raise
        finally:
            self._session = None
            self._owner.lost(self, reason, lives)


def channel_options(max_message_bytes: int) -> list[tuple[str, int]]:
    return [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        # No pings that measure the bandwidth: each wakes threads on both sides, and a message opens the window that it needs.
        ("grpc.http2.bdp_probe", 0),
        # Heartbeats tell a frozen executor from a busy one; keepalive only clears away connections whose peer is gone.
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.max_pings_without_data", 0),
        # Each attempt connects afresh at our own pace, not at that of a failed connection kept by the library.
        ("grpc.use_local_subchannel_pool", 1),
    ]
