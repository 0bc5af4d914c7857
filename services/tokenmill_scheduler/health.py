"""Readiness and liveness by the standard gRPC health protocol, told as they are.

Ready (services "", InferenceService, AdminService): an executor is connected and the database takes writes. Alive (service
`LIVENESS`): the loop turns; a step of half a minute does not stop it. Must not know: requests.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

import structlog
from grpc_health.v1 import health, health_pb2

LIVENESS = "tokenmill.liveness"
CHECK_INTERVAL_S = 1.0
# The loop's tick may be late by this much on a busy machine.
ALIVE_WITHIN_S = 5.0


class Health:
    """`not_ready` and `not_alive` say why not; empty when all is well."""

    def __init__(self, services: Sequence[str], not_ready: Callable[[], str], not_alive: Callable[[], str]) -> None:
        self.servicer = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self._services = ("", *services)
        self._not_ready = not_ready
        self._not_alive = not_alive
        self._changed = asyncio.Event()
        self._told: str | None = None
        self._served: dict[str, health_pb2.HealthCheckResponse.ServingStatus] = {}
        self._log = structlog.get_logger(__name__)

    def changed(self) -> None:
        """Something has happened that readiness hangs on; it is looked at without delay."""
        self._changed.set()

    async def watch(self) -> None:
        """Keeps what is served true until cancelled."""
        while True:
            await self._publish()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CHECK_INTERVAL_S):
                    await self._changed.wait()
            self._changed.clear()

    async def shut_down(self) -> None:
        """NOT_SERVING from here on, whatever `watch` finds."""
        await self.servicer.enter_graceful_shutdown()

    async def _publish(self) -> None:
        reason = self._not_ready()
        if reason != self._told:
            self._log.info("ready to serve" if not reason else "not ready", **({"reason": reason} if reason else {}))
            self._told = reason
        for service in self._services:
            await self._set(service, _status(reason))
        await self._set(LIVENESS, _status(self._not_alive()))

    async def _set(self, service: str, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        if self._served.get(service) != status:
            self._served[service] = status
            await self.servicer.set(service, status)


def _status(trouble: str) -> health_pb2.HealthCheckResponse.ServingStatus:
    serving = health_pb2.HealthCheckResponse
    return serving.NOT_SERVING if trouble else serving.SERVING
