"""The verdict: what clients were told against what the database holds, once the faults are over. Pure.

Every request that was accepted is stored, ended once and by legal moves; every token is the one foretold, under its index, stored
and told alike. A request that nobody cancelled, whose reader did not leave and whose deadline did not pass is DONE.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from tokenmill_scheduler.core.request import TERMINAL, TRANSITIONS, State

from benchmarks.chaos.sent import GIVEN_UP, Sent

QUARANTINED = "quarantined"


@dataclass(frozen=True, slots=True)
class Move:
    before: str | None
    after: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Stored:
    """A request's rows. `tokens` maps each index to the token ids stored under it, in the order found."""

    state: str
    num_output_tokens: int
    moves: tuple[Move, ...]
    tokens: Mapping[int, Sequence[int]]


@dataclass(frozen=True, slots=True)
class Violation:
    """`kind` is a row of the report."""

    kind: str
    request_id: str
    text: str


def audit(requests: Sequence[Sent], stored: Mapping[str, Stored]) -> list[Violation]:
    known = {sent.ask.request_id for sent in requests}
    strangers = [Violation("unknown", request_id, "stored, but nobody sent it") for request_id in stored if request_id not in known]
    return strangers + [
        Violation(kind, sent.ask.request_id, text)
        for sent in requests
        for kind, text in _judge(sent, stored.get(sent.ask.request_id))
    ]


def _judge(sent: Sent, stored: Stored | None) -> Iterator[tuple[str, str]]:
    yield from _judge_stream(sent)
    if stored is None:
        if sent.accepted:
            yield "lost", "accepted, but not stored"
        return
    yield from _judge_life(sent, stored)
    yield from _judge_tokens(sent, stored)


def _judge_stream(sent: Sent) -> Iterator[tuple[str, str]]:
    """What the client can tell by itself."""
    for kind in ("duplicated", "missing", "wrong"):
        if count := getattr(sent, kind):
            yield kind, f"{count} on its stream"
    for error in sent.errors:
        yield "errors", error
    if not sent.ended and not sent.abandoned:
        yield "hanging", f"its stream has not ended, after {len(sent.tokens)} tokens"


def _judge_life(sent: Sent, stored: Stored) -> Iterator[tuple[str, str]]:
    states = [move.after for move in stored.moves]
    if not stored.moves or stored.moves[0].before is not None or states[-1] != stored.state:
        yield "illegal", f"its moves do not lead from nothing to {stored.state}: {states}"
    for earlier, later in pairwise(stored.moves):
        if later.before != earlier.after or later.after not in TRANSITIONS[State(earlier.after)]:
            yield "illegal", f"{earlier.after}, then {later.before} → {later.after}"
    if (ends := sum(state in TERMINAL for state in states)) > 1:
        yield "illegal", f"it ended {ends} times: {states}"
    if stored.state not in TERMINAL:
        yield "hanging", f"it is {stored.state} in the database"
    elif stored.state not in _rightful_ends(sent, stored):
        yield "ended wrongly", f"it is {stored.state}: {stored.moves[-1].reason}"
    if sent.ended not in ("", GIVEN_UP, stored.state):
        yield "ended wrongly", f"its client was told {sent.ended}, it is {stored.state} in the database"


def _rightful_ends(sent: Sent, stored: Stored) -> set[str]:
    ends: set[str] = {State.DONE}
    # A request that needs a reader is cancelled when its connection is lost.
    if sent.cancelled or not sent.ask.detached:
        ends.add(State.CANCELLED)
    if sent.ask.deadline_s is not None:
        ends.add(State.EXPIRED)
    # The one who happened to be tried alone when its executor was killed once more.
    if stored.moves[-1].reason == QUARANTINED:
        ends.add(State.FAILED)
    return ends


def _judge_tokens(sent: Sent, stored: Stored) -> Iterator[tuple[str, str]]:
    doubled = [index for index, token_ids in stored.tokens.items() if len(token_ids) > 1]
    if doubled:
        yield "duplicated", f"indexes {doubled} are stored more than once"
    count = len(stored.tokens)
    if sorted(stored.tokens) != list(range(count)):
        yield "missing", f"stored indexes are not 0 to {count - 1}"
        return
    tokens = [stored.tokens[index][-1] for index in range(count)]
    if tokens != list(sent.ask.foretold(count)):
        yield "wrong", "stored tokens are not those foretold"
    if tokens[: len(sent.tokens)] != sent.tokens:
        yield "wrong", f"stored tokens are not the {len(sent.tokens)} that were told"
    if stored.state in TERMINAL and stored.num_output_tokens != count:
        yield "missing", f"its row says {stored.num_output_tokens} tokens, {count} are stored"
    if stored.state == State.DONE and count != sent.ask.max_tokens:
        yield "missing", f"done with {count} of {sent.ask.max_tokens} tokens"
    if sent.ended == stored.state and len(sent.tokens) != count:
        yield "missing", f"its client was told the end after {len(sent.tokens)} tokens, {count} are stored"


def count_by_kind(violations: Sequence[Violation]) -> Counter[str]:
    return Counter(violation.kind for violation in violations)
