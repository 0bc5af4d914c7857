"""Short ways to the records that a ledger is given."""

from __future__ import annotations

from tokenmill_scheduler.core.effects import TokensGenerated, Transitioned
from tokenmill_scheduler.core.request import FinishReason, Request, Sampling, State
from tokenmill_scheduler.ledger.port import Ledger
from tokenmill_scheduler.ledger.records import Submission


def submission(
    request_id: str = "a",
    *,
    arrival_s: float = 100.0,
    digest: bytes = b"digest",
    prompt: tuple[int, ...] = (1, 2, 3),
    priority: int = 0,
    tenant: str = "default",
    deadline_s: float | None = None,
) -> Submission:
    sampling = Sampling(max_tokens=64, seed=7)
    request = Request(request_id, "model", prompt, sampling, arrival_s, priority, deadline_s, tenant)
    return Submission(request, digest)


def tokens(request_id: str, first_index: int, *token_ids: int, at_s: float = 103.0) -> TokensGenerated:
    return TokensGenerated((request_id,), (first_index,), (len(token_ids),), token_ids, at_s)


def prefill(request_id: str = "a", *, before: State = State.WAITING, at_s: float = 101.0) -> Transitioned:
    return Transitioned(request_id, before, State.PREFILL, at_s, "admitted", executor="x0")


def decode(request_id: str = "a", *, at_s: float = 102.0) -> Transitioned:
    return Transitioned(request_id, State.PREFILL, State.DECODE, at_s, executor="x0")


def done(request_id: str = "a", *, before: State = State.DECODE, at_s: float = 110.0) -> Transitioned:
    return Transitioned(request_id, before, State.DONE, at_s, "stop id", finish_reason=FinishReason.STOP)


def run_to_decode(ledger: Ledger, request_id: str = "a") -> None:
    """Submits a request and moves it to DECODE."""
    ledger.write([submission(request_id), prefill(request_id), decode(request_id)])


def run_to_end(ledger: Ledger, request_id: str = "a", *, at_s: float = 110.0) -> None:
    """Submits a request that makes three tokens and ends."""
    run_to_decode(ledger, request_id)
    ledger.write([tokens(request_id, 0, 5, 6, 7), done(request_id, at_s=at_s)])
