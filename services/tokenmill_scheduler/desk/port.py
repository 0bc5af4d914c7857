"""What may be asked of a scheduler: by clients, and by operators. `tests/fakes` has an in-memory desk with the same contract.

Must not know: protobuf, SQL, how it is answered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, Self

from tokenmill_scheduler.core.request import Request
from tokenmill_scheduler.desk.records import (
    Cancellation,
    Chunk,
    Ended,
    ExecutorStatus,
    Load,
    PolicyStatus,
    RequestStatus,
    ServedModel,
    Submitted,
)
from tokenmill_scheduler.ledger.records import (
    ActionPage,
    ActionQuery,
    RequestPage,
    RequestQuery,
    StoredOutput,
    StoredRequest,
    StoredTransition,
)
from tokenmill_scheduler.ordering_choice import OrderingChoice


class ChunkStream(Protocol):
    """Yields Chunks in index order without gap or repeat, coalescing what gathered while the reader was busy, then one Ended.

    `aclose` says that the reader leaves, also before the first item: for a request that is not detached, the last reader's leaving
    cancels it. Raises Unavailable when the scheduler shuts down; the reader may attach again.
    """

    def __aiter__(self) -> Self: ...

    async def __anext__(self) -> Chunk | Ended: ...

    async def aclose(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Attachment:
    """A stream of a request's committed tokens. `earlier` are those before the index asked for. Close `chunks` when done."""

    request: Request
    earlier: tuple[int, ...]
    chunks: ChunkStream


class Desk(Protocol):
    def model(self, name: str) -> ServedModel:
        """The model of this name, or the only one when `name` is empty. Raises UnknownModel, or Unavailable before any is known."""

    def models(self) -> tuple[ServedModel, ...]: ...

    def most_choices(self, model: str, num_prompt_tokens: int, max_tokens: int) -> int | None:
        """Of a prompt of so many tokens, the most that an executor can ever run at once; None if that is not known now."""

    async def submit(self, request: Request, payload_digest: bytes) -> Submitted:
        """Returns once the request is durable, with all its choices.

        Raises RequestExists, QueueFull, TenantLimit, Overloaded, Unavailable.
        """

    async def attach(self, request_id: str, next_index: int) -> Attachment:
        """To one request, or to one choice: the id of a request is that of its first. Raises UnknownRequest, IndexAhead."""

    async def attach_all(self, next_indexes: Mapping[str, int]) -> tuple[Attachment, ...]:
        """As `attach`, to all of them, each from an index on, or to none."""

    async def cancel(self, request_id: str, reason: str, actor: str = "") -> Cancellation:
        """Returns once it is durable. `actor` is the operator who does it, empty for the client.

        A request whose scheduler has fallen is waited for, here and in `update`, until another has taken it over. Raises
        UnknownRequest, Unavailable.

        The id of a request stands for all its choices here and in `update`, that of a further choice for it alone.
        """

    async def update(
        self, request_id: str, priority: int | None, deadline_s: float | None, reason: str = "", actor: str = ""
    ) -> RequestStatus:
        """Returns once it is durable. Raises UnknownRequest, RequestEnded, Unavailable."""

    async def retry(self, request_id: str, new_request_id: str, reason: str, actor: str) -> None:
        """Submits a FAILED request again under a new id; it runs detached. Returns once it is durable.

        Raises UnknownRequest, RequestNotFailed, QueueFull, Unavailable.
        """

    async def status(self, request_id: str) -> RequestStatus:
        """Raises UnknownRequest."""

    async def output(self, request_id: str) -> StoredOutput:
        """All output so far. Raises UnknownRequest."""

    async def transitions(self, request_id: str) -> tuple[StoredTransition, ...]:
        """Raises UnknownRequest."""

    async def query(self, query: RequestQuery) -> RequestPage:
        """Raises ValueError when the page token is not one it gave."""

    def standing(self, stored: StoredRequest) -> RequestStatus:
        """With why it waits, if it does."""

    def executors(self) -> tuple[ExecutorStatus, ...]: ...

    def load(self) -> Load: ...


class OperatorDesk(Protocol):
    """What operators hold back, and the record of what they did. A change returns once it is durable; all may raise Unavailable."""

    async def pause_queue(self, actor: str, reason: str) -> bool:
        """False when it was paused already."""

    async def resume_queue(self, actor: str, reason: str) -> bool:
        """False when it was not paused."""

    async def drain_executor(self, name: str, actor: str, reason: str) -> ExecutorStatus:
        """Raises UnknownExecutor."""

    async def undrain_executor(self, name: str, actor: str, reason: str) -> ExecutorStatus:
        """Also one that has not joined since the start. Raises UnknownExecutor where there is neither it nor a drain of it."""

    def policy(self) -> PolicyStatus: ...

    async def set_policy(self, choice: OrderingChoice, actor: str, reason: str) -> bool:
        """False when it is in force already."""

    async def reset_policy(self, actor: str, reason: str) -> bool:
        """Back to that of the settings. False when none was set."""

    async def actions(self, query: ActionQuery) -> ActionPage:
        """Raises ValueError when the page token is not one it gave."""
