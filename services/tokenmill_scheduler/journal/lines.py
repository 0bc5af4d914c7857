"""The lines of a journal: a header, then entries; what an event led to is an outline to read and a digest to compare.

    {"journal": 1, "config": {…}}                                       what the core was made with
    {"n": 1, "at": 1700000000.5, "event": {…}, "led_to": […], "digest": "…"}
    {"missing": 12}                                                     so many events were not written: it fell behind
    {"full": 1073741824}                                                nothing follows: the file has reached its bound

Must not know: files, threads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from tokenmill_scheduler.core.effects import Effect, PlanIssued, TokensGenerated, Transitioned
from tokenmill_scheduler.core.events import Event
from tokenmill_scheduler.core.plans import Plan
from tokenmill_scheduler.core.scheduler import SchedulerConfig
from tokenmill_scheduler.journal.codec import CodecError, decode, decode_fields, encode, encode_fields

VERSION = 1
# What the core answered an event with: effects, or an exception, which ends the service.
Outcome = Sequence[Effect] | Exception


class JournalError(ValueError):
    """A file that is no journal of this release; the text is one sentence."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Event `number` (from 1 on) came at `at_s`; `led_to` outlines its effects, `digest` is over all of them."""

    number: int
    at_s: float
    event: Event
    led_to: tuple[str, ...]
    digest: str


@dataclass(frozen=True, slots=True)
class Missing:
    """So many events were not written."""

    count: int


@dataclass(frozen=True, slots=True)
class Full:
    """The bound was reached: nothing follows."""

    size_bytes: int


Line = Entry | Missing | Full


def dump(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def header(config: SchedulerConfig) -> str:
    return dump({"journal": VERSION, "config": encode_fields(config)})


def entry(number: int, at_s: float, event: Event, outcome: Outcome) -> str:
    led_to, digest = told(outcome)
    return dump({"n": number, "at": at_s, "event": encode(event), "led_to": led_to, "digest": digest})


def told(outcome: Outcome) -> tuple[tuple[str, ...], str]:
    """Its outline, and a digest of every byte of it."""
    if isinstance(outcome, Exception):
        text = f"raised {outcome!r}"
        return (text,), _digest(text)
    return tuple([outline(effect) for effect in outcome]), _digest("\n".join([dump(encode(effect)) for effect in outcome]))


def _digest(text: str) -> str:
    return blake2b(text.encode(), digest_size=8).hexdigest()


def parse_header(text: bytes) -> SchedulerConfig:
    """Raises JournalError."""
    value = _object(text)
    if value.get("journal") != VERSION:
        raise JournalError("the file does not begin as a plan journal of this release does")
    try:
        config: SchedulerConfig = decode_fields(SchedulerConfig, value["config"])
    except (KeyError, CodecError) as error:
        raise JournalError(f"the journal's configuration is not of this release: {error}") from error
    return config


def parse(text: bytes) -> Line:
    """Raises JournalError."""
    value = _object(text)
    if "missing" in value:
        return Missing(value["missing"])
    if "full" in value:
        return Full(value["full"])
    try:
        event: Any = decode(value["event"])
        return Entry(value["n"], value["at"], event, tuple(value["led_to"]), value["digest"])
    except (KeyError, CodecError) as error:
        raise JournalError(f"event {value.get('n', '?')} is not of this release: {error}") from error


def _object(text: bytes) -> Mapping[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise JournalError(f"a line is no JSON: {error}") from error
    if not isinstance(value, Mapping):
        raise JournalError("a line is no JSON object")
    return value


# ---- outlines ------------------------------------------------------------------------------------------------------------------


def outline(effect: Effect) -> str:
    """One line a person can read; tokens themselves are in the digest alone."""
    match effect:
        case PlanIssued():
            return f"{effect.executor} {_plan(effect.plan)}"
        case TokensGenerated():
            return f"{len(effect.token_ids)} tokens for {len(effect.request_ids)} requests"
        case Transitioned():
            end = f" ({effect.finish_reason})" if effect.finish_reason else ""
            return f"{effect.request_id} {effect.before} → {effect.after}{end}"
    return dump(encode(effect))


def _plan(plan: Plan) -> str:
    parts = []
    if plan.release:
        parts.append(f"release {_numbers(plan.release)}")
    if plan.admit:
        parts.append(f"admit {_numbers([admission.sequence_id for admission in plan.admit])}")
    if plan.advance_sequence_ids:
        parts.append(f"advance {_numbers(plan.advance_sequence_ids)} by {_numbers(plan.advance_max_tokens)}")
    return f"plan {plan.plan_id}: {'; '.join(parts)}"


def _numbers(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))
