"""A Prometheus endpoint: figures are gathered on the event loop, whose they are, and told by a thread of the server.

A scrape that the loop does not answer in time is a 503: a service that stands still does not look well. Must not know: what is
measured.
"""

from __future__ import annotations

import asyncio
import socket
import socketserver
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from itertools import accumulate
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler

from prometheus_client import CollectorRegistry, Metric, ProcessCollector, make_wsgi_app
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.registry import Collector

from tokenmill_service.flags import SettingsError
from tokenmill_service.histogram import Histogram

# Prometheus gives up after 10 s unless told otherwise.
_ANSWER_LIMIT_S = 5.0
_CLIENT_LIMIT_S = 10.0
_POLL_S = 0.2

Collect = Callable[[], Sequence[Metric]]


def histogram_family(
    name: str, documentation: str, label_names: Sequence[str], histograms: Iterable[tuple[Sequence[str], Histogram]]
) -> HistogramMetricFamily:
    """`histograms` come with their label values."""
    family = HistogramMetricFamily(name, documentation, labels=label_names)
    for labels, histogram in histograms:
        family.add_metric(labels, buckets=list(_buckets(histogram)), sum_value=histogram.total)
    return family


def _buckets(histogram: Histogram) -> Iterator[tuple[str, float]]:
    reached = accumulate(histogram.counts)
    return zip((*map(repr, histogram.bounds), "+Inf"), reached, strict=True)


class MetricsServer:
    """Serves what `collect` gives, which runs on the event loop that this is made on. `address` is the one that was bound."""

    def __init__(self, address: str, collect: Collect) -> None:
        """Raises SettingsError when the address cannot be had."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_OnLoop(collect, asyncio.get_running_loop()))
        ProcessCollector(registry=registry)
        host, _, port = address.rpartition(":")
        try:
            self._server = _Server(host.strip("[]"), int(port))
        except OSError as error:
            raise SettingsError(f"--metrics-address {address} cannot be bound: {error.strerror or error}") from error
        self._server.set_app(_when_it_answers(make_wsgi_app(registry)))
        self.address = f"{host}:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(_POLL_S,), name="metrics", daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        await asyncio.to_thread(self._server.shutdown)
        self._server.server_close()


class LoopStandsStill(Exception):
    """The event loop did not answer within the time that a scrape has."""


class _OnLoop(Collector):
    """Asked on a thread of the server."""

    def __init__(self, collect: Collect, loop: asyncio.AbstractEventLoop) -> None:
        self._collect = collect
        self._loop = loop

    def collect(self) -> Iterable[Metric]:
        """Raises LoopStandsStill."""
        answer: Future[Sequence[Metric]] = Future()
        try:
            self._loop.call_soon_threadsafe(self._answer, answer)
            return answer.result(_ANSWER_LIMIT_S)
        except (TimeoutError, RuntimeError) as error:
            # A loop that is closed raises RuntimeError.
            raise LoopStandsStill from error

    def _answer(self, answer: Future[Sequence[Metric]]) -> None:
        try:
            answer.set_result(self._collect())
        except Exception as error:
            answer.set_exception(error)


def _when_it_answers(app: Callable[..., Iterable[bytes]]) -> Callable[..., Iterable[bytes]]:
    def guarded(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        try:
            return app(environ, start_response)
        except LoopStandsStill:
            start_response("503 Service Unavailable", [("Content-Type", "text/plain")])
            return [b"the service does not answer\n"]

    return guarded


class _Handler(WSGIRequestHandler):
    # A client that says nothing holds its thread no longer.
    timeout = _CLIENT_LIMIT_S

    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes are not worth a line."""


class _Server(ThreadingWSGIServer):
    def __init__(self, host: str, port: int) -> None:
        self.address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        # Not http.server's, which asks the name service who this host is, and waits for the answer.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]
        self.setup_environ()
