"""Requests that need a client and have none: it did not come back after a restart, or it is there and reads nothing.

Must not know: what becomes of the events that end them, gRPC.
"""

from __future__ import annotations

from tokenmill_scheduler.core.events import Cancelled, Event, Expired
from tokenmill_scheduler.idle import IdleClients
from tokenmill_scheduler.live import LiveRequests


class Abandoned:
    """`orphan_grace_s`: how long a client has to come back. It runs while clients can attach: not before `served` was called."""

    def __init__(self, live: LiveRequests, orphan_grace_s: float, idle_clients: IdleClients) -> None:
        self._live = live
        self._orphan_grace_s = orphan_grace_s
        self._idle_clients = idle_clients
        self._served_since_s: float | None = None

    def served(self, now_s: float) -> None:
        """There is a model to attach to."""
        if self._served_since_s is None:
            self._served_since_s = now_s

    def ends(self, now_s: float) -> list[Event]:
        """For each request that has had no client, or an idle one, for too long. Times are Unix seconds."""
        orphans = [
            Cancelled(request_id, "its client did not come back") for request_id in self._orphans(now_s - self._orphan_grace_s)
        ]
        idle = self._idle_clients.find(self._live.attended, now_s)
        return [*orphans, *(Expired(request_id, self._idle_clients.reason) for request_id in idle)]

    def _orphans(self, before_s: float) -> list[str]:
        if self._served_since_s is None or self._served_since_s >= before_s:
            return []
        return self._live.orphans_since(before_s)
