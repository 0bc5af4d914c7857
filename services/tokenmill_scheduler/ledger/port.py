"""What the scheduler asks of its ledger: records in, records out. Rows and SQL stay behind this port.

`tests/fakes` has an in-memory ledger with the same contract; tests/unit/ledger runs the contract against all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from tokenmill_scheduler.core.events import KnownExecutor
from tokenmill_scheduler.core.plans import ExecutorDescription
from tokenmill_scheduler.ledger.records import (
    ActionPage,
    ActionQuery,
    Command,
    Estate,
    Hold,
    Lease,
    LeaseStatus,
    Outcome,
    Record,
    RequestPage,
    RequestQuery,
    StoredOutput,
    StoredRequest,
    StoredTransition,
)


class Ledger(Protocol):
    """Thread-safe; writes take turns. Every method may raise LedgerUnavailable.

    Tokens of a request must follow the last one stored, and a move must leave the stored state and be in TRANSITIONS: else
    LedgerConflict.
    """

    def write(self, records: Sequence[Record], lease: Lease | None = None) -> list[Outcome]:
        """Writes all records in one transaction, durable on return, and answers for each.

        Requests that are submitted are those of `lease`, and it moves no other's: that gives LedgerConflict.
        A Submission that exists already gives JOINED or CONFLICT and does not disturb the others.
        Raises LedgerUnavailable (the same call may be repeated, and under a lease never writes twice), LedgerConflict (nothing
        written), or LeaseLost when `lease` no longer holds (nothing written).
        """

    def unfinished(self) -> Iterator[tuple[StoredRequest, StoredOutput]]:
        """Every request in no terminal state, in order of arrival (ties: of acceptance), with its output so far."""

    def find(self, request_id: str) -> StoredRequest | None: ...

    def payload_digest(self, request_id: str) -> bytes | None: ...

    def output(self, request_id: str, first_index: int = 0) -> StoredOutput:
        """Empty when there is none from `first_index` on. Raises LedgerCorrupt when the stored chunks do not join."""

    def transitions(self, request_id: str) -> tuple[StoredTransition, ...]: ...

    def query(self, query: RequestQuery) -> RequestPage:
        """Raises ValueError when the page token is not one it gave for this order."""

    def actions(self, query: ActionQuery) -> ActionPage:
        """Raises ValueError when the page token is not one it gave."""

    def holds(self) -> tuple[Hold, ...]:
        """All that are in force, by target."""

    def progress(self, counts: Mapping[str, int]) -> dict[str, tuple[StoredRequest, StoredOutput]]:
        """Of these requests, by id, those that have more tokens than counted here or have ended, with the output from there on."""

    # ---- leases: each may raise LeaseLost, with nothing done ----

    def take_lease(self, scheduler: str, lease_s: float) -> Lease: ...

    def renew_lease(self, lease: Lease, lease_s: float) -> None:
        """Runs out in `lease_s` from now. One that has run out and was not taken over is renewed."""

    def give_up_lease(self, lease: Lease) -> None:
        """Its scheduler writes no more: another may take over at once. Nothing happens if it was lost already."""

    def leases(self) -> tuple[LeaseStatus, ...]:
        """In order of their numbers."""

    def take_over(self, lease: Lease, fallen: Sequence[int], told: Sequence[str] = ()) -> Estate:
        """Ends these leases, whether or not they have run out, and makes what they held that of `lease`, durable on return.

        Requests that no lease ever held come along. Of the executors that a fallen scheduler of the same name was told of, the new
        one keeps those at the addresses that it is `told`; the others are left free. A lease that another has ended meanwhile is
        passed over.
        Raises LedgerConflict when it cannot tell whether it was carried out.
        """

    def held(self, lease: Lease, request_ids: Sequence[str]) -> tuple[tuple[StoredRequest, StoredOutput], ...]:
        """Of these requests those of `lease` that have not ended, in order of arrival, with their output so far."""

    def claim_executor(self, lease: Lease, executor: str, address: str, *, inherited: bool, at_least: int) -> int:
        """The executor is that of `lease` from here on. Returns its epoch: never given before for it and ≥ `at_least`. Raises
        EpochsUsedUp.

        `inherited` gives way to a scheduler that was told of the executor, and raises ExecutorTaken where one drives it;
        without, ExecutorTaken is raised where another does that has not merely inherited it.
        """

    def has_executor(self, lease: Lease, executor: str) -> bool: ...

    def tell_executors(self, lease: Lease, connected: Sequence[ExecutorDescription]) -> None:
        """Of the executors of this lease these are connected, and can hold so much. Those that are another's are passed over."""

    def known_executors(self, lease: Lease) -> tuple[KnownExecutor, ...]:
        """Those of all leases that were ever connected, by name; `elsewhere` are those that another has connected."""

    # ---- commands from one scheduler to another ----

    def send(self, commands: Sequence[Command]) -> tuple[int, ...]:
        """Their numbers."""

    def pending(self, numbers: Sequence[int]) -> frozenset[int]:
        """Which of them nobody has carried out or withdrawn, nor lost with the scheduler they were for."""

    def received(self, lease: Lease) -> tuple[tuple[int, Command], ...]:
        """What others ask of this scheduler, in order, each with its number."""

    def settle(self, numbers: Sequence[int]) -> None:
        """They are carried out, or withdrawn."""

    def prune(self, before_s: float, limit: int) -> int:
        """Deletes up to `limit` requests that ended before then (Unix seconds), with their output, and as many old actions.

        A request of several choices is deleted as a whole, once all of them have ended before then. Returns how many rows it were,
        each choice counted.
        """

    def close(self) -> None: ...
