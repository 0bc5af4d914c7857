"""Reads a journal and runs the core over it: does it decide the same, byte for byte? Must not know: how answers are shown."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

from tokenmill_scheduler.core.counters import Counters
from tokenmill_scheduler.core.effects import Effect, PlanIssued
from tokenmill_scheduler.core.events import Event
from tokenmill_scheduler.core.scheduler import Scheduler, SchedulerConfig
from tokenmill_scheduler.journal.lines import Entry, Full, JournalError, Missing, parse, parse_header, told

_GZIP = b"\x1f\x8b"
_CHUNK_BYTES = 1 << 16
Observer = Callable[[Scheduler, float, Event, list[Effect]], None]


@dataclass(frozen=True, slots=True)
class Difference:
    """At the first event after which the core decided otherwise: outlines of what it did then, and does now.

    They can be equal: tokens, prompts and reasons are in the digests alone.
    """

    entry: Entry
    got: tuple[str, ...]
    got_digest: str


@dataclass(frozen=True, slots=True)
class Replay:
    """`missing`: the journal lacks so many events after these, so that no more could be compared. `full`: it ends by its bound.

    `counters` are the core's as it was left.
    """

    config: SchedulerConfig
    counters: Counters
    events: int
    plans: int
    difference: Difference | None = None
    missing: int = 0
    full: bool = False


def replay(path: Path, observer: Observer | None = None) -> Replay:
    """Up to the first difference, to the first gap, or to the end. Raises JournalError, or OSError.

    `observer` sees each event with what it leads to now.
    """
    events = plans = 0
    texts = _lines(path)
    config = parse_header(next(texts, b""))
    core = Scheduler(config)
    for line in map(parse, texts):
        if isinstance(line, Missing):
            return Replay(config, core.counters, events, plans, missing=line.count)
        if isinstance(line, Full):
            return Replay(config, core.counters, events, plans, full=True)
        outcome = _handled(core, line)
        events += 1
        got, got_digest = told(outcome)
        if got_digest != line.digest:
            return Replay(config, core.counters, events, plans, Difference(line, got, got_digest))
        if isinstance(outcome, Exception):
            break
        plans += sum(isinstance(effect, PlanIssued) for effect in outcome)
        if observer is not None:
            observer(core, line.at_s, line.event, outcome)
    return Replay(config, core.counters, events, plans)


def _handled(core: Scheduler, entry: Entry) -> list[Effect] | Exception:
    """A core that raises ends: so it did then, or it is a difference."""
    try:
        return core.handle(entry.event, entry.at_s)
    except Exception as error:
        return error


def _lines(path: Path) -> Iterator[bytes]:
    """A last line that was cut off when the process was killed is no line."""
    with path.open("rb") as file:
        chunks = iter(partial(file.read, _CHUNK_BYTES), b"")
        first = next(chunks, b"")
        rest = b""
        for chunk in _plain(chain([first], chunks), is_gzip=first.startswith(_GZIP)):
            *whole, rest = (rest + chunk).split(b"\n")
            yield from whole


def _plain(chunks: Iterable[bytes], is_gzip: bool) -> Iterator[bytes]:
    """All that can be read of a gzip file, though its end is missing."""
    if not is_gzip:
        yield from chunks
        return
    unpacker = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
    try:
        yield from map(unpacker.decompress, chunks)
    except zlib.error as error:
        raise JournalError(f"the file is damaged: {error}") from error
