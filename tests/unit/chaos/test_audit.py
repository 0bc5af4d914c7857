"""The oracle of the chaos runs finds what it is there to find."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from benchmarks.chaos.audit import QUARANTINED, Move, Stored, audit
from benchmarks.chaos.sent import Ask, Sent

ASK = Ask("r", (65, 66), max_tokens=4, seed=3, detached=True)
TOKENS = ASK.foretold(4)
LIFE = (Move(None, "waiting"), Move("waiting", "prefill"), Move("prefill", "decode"), Move("decode", "done"))


def told(*messages: tuple[int, Sequence[int]], ended: str = "done", ask: Ask = ASK) -> Sent:
    """A request whose client got these tokens from these indexes on."""
    sent = Sent(ask, sent_s=0.0)
    for first_index, token_ids in messages:
        sent.took(first_index, token_ids, "".join(map(chr, token_ids)), 1.0)
    if ended:
        sent.end(ended, 2.0)
    return sent


def stored(tokens: Sequence[int] = TOKENS, moves: tuple[Move, ...] = LIFE, count: int | None = None) -> Stored:
    rows = {index: [token_id] for index, token_id in enumerate(tokens)}
    return Stored(moves[-1].after, len(tokens) if count is None else count, moves, rows)


def ended(state: str, reason: str = "") -> tuple[Move, ...]:
    return (*LIFE[:-1], Move("decode", state, reason))


def kinds(sent: Sent, row: Stored | None) -> list[str]:
    return [violation.kind for violation in audit([sent], {} if row is None else {"r": row})]


WHOLE = (0, TOKENS)


@pytest.mark.parametrize(
    ("sent", "row"),
    [
        (told(WHOLE), stored()),
        (told((0, TOKENS[:1]), (1, TOKENS[1:])), stored()),
        (told(ended="cancelled", ask=replace(ASK, detached=False)), stored((), (LIFE[0], Move("waiting", "cancelled")))),
        (told((0, TOKENS[:2]), ended="expired", ask=replace(ASK, deadline_s=1.0)), stored(TOKENS[:2], ended("expired"))),
        (told((0, TOKENS[:2]), ended="failed"), stored(TOKENS[:2], ended("failed", QUARANTINED))),
    ],
)
def test_all_is_well(sent: Sent, row: Stored) -> None:
    assert kinds(sent, row) == []


def test_a_request_that_was_never_accepted_need_not_be_stored() -> None:
    sent = told(ended="")
    sent.abandoned = True
    assert kinds(sent, None) == []


@pytest.mark.parametrize(
    ("kind", "sent", "row"),
    [
        ("lost", told(WHOLE), None),
        ("duplicated", told((0, TOKENS[:2]), (1, TOKENS[1:])), stored()),
        ("missing", told((0, TOKENS[:1]), (2, TOKENS[2:])), stored()),
        ("missing", told((0, TOKENS[:3])), stored()),
        ("missing", told((0, TOKENS[:3])), stored(TOKENS[:3])),
        ("missing", told(WHOLE), stored(count=3)),
        ("wrong", told((0, [*TOKENS[:3], TOKENS[3] ^ 1])), stored()),
        ("wrong", told(WHOLE), stored([*TOKENS[:3], TOKENS[3] ^ 1])),
        ("wrong", told(WHOLE, ended="cancelled"), stored(TOKENS[:2], ended("cancelled"))),
        ("hanging", told((0, TOKENS[:2]), ended=""), stored()),
        ("hanging", told(WHOLE), stored(moves=LIFE[:-1])),
        ("ended wrongly", told(ended="cancelled"), stored((), (LIFE[0], Move("waiting", "cancelled")))),
        ("ended wrongly", told(WHOLE, ended="failed"), stored()),
        ("ended wrongly", told(ended="failed"), stored((), ended("failed", "a bug"))),
        ("illegal", told(WHOLE), stored(moves=(LIFE[0], Move("waiting", "decode"), LIFE[-1]))),
        ("illegal", told(WHOLE), stored(moves=(*LIFE, Move("done", "done")))),
        ("illegal", told(WHOLE), stored(moves=LIFE[1:])),
    ],
)
def test_a_violation_is_found(kind: str, sent: Sent, row: Stored | None) -> None:
    assert kind in kinds(sent, row)


def test_an_index_stored_twice_and_a_request_of_nobody() -> None:
    row = stored()
    doubled = replace(row, tokens={**row.tokens, 2: [TOKENS[2], TOKENS[2]]})
    assert kinds(told(WHOLE), doubled) == ["duplicated"]
    assert [violation.kind for violation in audit([], {"r": row})] == ["unknown"]
