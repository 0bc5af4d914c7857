"""Clients that are connected and read nothing: what they asked for is not computed for ever.

Must not know: the core, gRPC. What a client has not read is in gRPC's buffers first, so only what does not fit there shows here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tokenmill_scheduler.live import RequestView

# A share of the timeout, so that looking costs nothing and is late by little.
_LOOKS_A_TIMEOUT = 10


@dataclass(frozen=True, slots=True)
class _Seen:
    takes: int
    since_s: float


class IdleClients:
    """A request's client is idle when none of its readers waits for more and none has taken anything for `timeout_s` (0: never).

    One that is read through another scheduler too is left alone.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._seen: dict[str, _Seen] = {}
        self._next_look_s = float("-inf")

    @property
    def reason(self) -> str:
        return f"its client has read nothing for {self._timeout_s:g} s"

    def find(self, attended: Mapping[str, RequestView], now_s: float) -> list[str]:
        """Of requests that have readers, those whose client is idle. `now_s` is Unix seconds; looks at most ten times a timeout."""
        if not self._timeout_s or now_s < self._next_look_s:
            return []
        self._next_look_s = now_s + self._timeout_s / _LOOKS_A_TIMEOUT
        busy = {request_id: live.feed for request_id, live in attended.items() if not live.feed.waiting and not live.read_elsewhere}
        self._seen = {request_id: self._look(request_id, feed.takes, now_s) for request_id, feed in busy.items()}
        return [request_id for request_id, seen in self._seen.items() if now_s - seen.since_s >= self._timeout_s]

    def _look(self, request_id: str, takes: int, now_s: float) -> _Seen:
        before = self._seen.get(request_id)
        return before if before is not None and before.takes == takes else _Seen(takes, now_s)
