"""The executor as a process: binds, loads, serves until told to stop.

Health answers from the first moment, NOT_SERVING until the model is loaded; so does the service, with UNAVAILABLE.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from tokenmill.executor.v1 import executor_pb2, executor_pb2_grpc
from tokenmill_service.address import bound_address, default_name, is_open, lock_address, write_port_file
from tokenmill_service.collector import collector_paused
from tokenmill_service.flags import SettingsError
from tokenmill_service.metrics import MetricsServer
from tokenmill_service.tls import server_credentials

from tokenmill_executor.engine_thread import EngineThread
from tokenmill_executor.loading import Loader
from tokenmill_executor.servicer import ExecutorServicer
from tokenmill_executor.settings import Settings

log = structlog.get_logger(__name__)

SERVICE_NAME = executor_pb2.DESCRIPTOR.services_by_name["ExecutorService"].full_name
# What a status may take to reach its client once its stream is over.
_LAST_WORDS_S = 0.2


class ExecutorServer:
    """The gRPC server with the executor's service, health and reflection. For tests, any loader and heartbeat."""

    def __init__(self, settings: Settings, loader: Loader, heartbeat_interval_s: float = 1.0) -> None:
        self._settings = settings
        self._loader = loader
        self.thread = EngineThread()
        self.servicer = ExecutorServicer(self.thread, heartbeat_interval_s)
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self._server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", settings.max_message_bytes),
                ("grpc.max_send_message_length", settings.max_message_bytes),
                # Without this a second server would silently share the port.
                ("grpc.so_reuseport", 0),
                # No pings that measure the bandwidth: they wake threads on both sides, and a message opens the window it needs.
                ("grpc.http2.bdp_probe", 0),
                # Schedulers may ping an idle stream once a second.
                ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
            ]
        )
        executor_pb2_grpc.add_ExecutorServiceServicer_to_server(self.servicer, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection([SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME], self._server)
        self._metrics: MetricsServer | None = None
        self.address = ""

    async def bind(self) -> None:
        """Listens, and answers health. Raises SettingsError if the address cannot be had or a certificate is not right."""
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        self.address = bound_address(self._settings.listen, self._listen())
        if is_open(self.address) and (self._settings.tls is None or self._settings.tls.client_ca is None):
            log.warning(
                "whoever reaches this address may drive the executor and read what passes: give --tls-cert, --tls-key and "
                "--tls-client-ca, or keep the network private"
            )
        if self._settings.metrics_address:
            self._metrics = MetricsServer(self._settings.metrics_address, self.thread.gather)
            log.info("metrics served", address=self._metrics.address)
        await self._server.start()

    def _listen(self) -> int:
        listen, tls = self._settings.listen, self._settings.tls
        credentials = None if tls is None else server_credentials(tls)
        try:
            return (
                self._server.add_insecure_port(listen) if credentials is None else self._server.add_secure_port(listen, credentials)
            )
        except RuntimeError as error:
            raise SettingsError(f"--listen {listen} cannot be bound: choose a free address here") from error

    async def load(self) -> None:
        """Loads the model and opens the service. Raises what loading raises."""
        await self.thread.load(self._loader.load)
        offer = self._loader.offer(self._settings.name or default_name(self.address))
        served = offer.description
        self.thread.metrics.description = {"name": served.name, "model": served.model, "device": served.device}
        self.servicer.open(offer)
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)

    async def stop(self, timeout_s: float) -> bool:
        """Answers the plans in hand, refuses new streams, closes. Says whether the engine came to rest within `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        await self._health.enter_graceful_shutdown()
        await self.servicer.close(timeout_s)
        await self._server.stop(_LAST_WORDS_S)
        if self._metrics is not None:
            await self._metrics.stop()
        return await self.thread.close(max(0.0, deadline_s - time.monotonic()))

    async def _set_health(self, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        for name in ("", SERVICE_NAME):
            await self._health.set(name, status)


async def serve(settings: Settings, make_loader: Callable[[Settings], Loader] = Loader) -> int:
    """Runs until SIGTERM or SIGINT; returns the exit code. Raises SettingsError for an operator's mistake."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    lock_address(settings.listen)
    server = ExecutorServer(settings, make_loader(settings))
    await server.bind()
    log.info("loading", model=settings.model, address=server.address)
    told_to_stop = asyncio.create_task(stop.wait())
    failed = asyncio.create_task(server.servicer.failed.wait())
    loading = asyncio.create_task(_load(server))
    try:
        await asyncio.wait([loading, told_to_stop], return_when=asyncio.FIRST_COMPLETED)
        if loading.done():
            await loading
            _announce(settings, server)
            await asyncio.wait([told_to_stop, failed], return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (loading, told_to_stop, failed):
            task.cancel()
        log.info("stopping")
        # Half a model is of no use to anybody: loading is not waited for.
        at_rest = await server.stop(settings.shutdown_timeout_s if server.thread.loaded else 0.0)
    code = 1 if server.servicer.failed.is_set() else 0
    if not at_rest:
        # A thread deep in a step or in loading cannot be interrupted, and the interpreter would wait for it.
        log.warning("abandoned", reason="the engine did not come to rest in time", timeout_s=settings.shutdown_timeout_s)
        os._exit(code)
    log.info("stopped")
    return code


async def _load(server: ExecutorServer) -> None:
    with collector_paused():
        await server.load()


def _announce(settings: Settings, server: ExecutorServer) -> None:
    if settings.port_file is not None:
        write_port_file(settings.port_file, server.address)
    log.info("ready", address=server.address, model=settings.served_model_name or settings.model)
