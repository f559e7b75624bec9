"""An HTTP endpoint with metrics, for Prometheus and `crossrail top`."""

from __future__ import annotations

import contextlib
import operator
import os
import re
import threading
from types import TracebackType
from typing import Any
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.registry import Collector

from crossrail import Engine, _options
from crossrail.errors import TransportError, UsageError
from crossrail.observe.metrics import PEERS_MAX, EngineCollector

DEFAULT_PORT = 9478
PATIENCE_S = 10.0
# prometheus_client compares versions as tuples of numbers, and fails where one is anything else.
_BAD_VERSION = re.compile(r"version=(?!\d{1,9}(\.\d{1,9})*\s*([;,]|$))", re.ASCII)


class MetricsServer:
    """Made by serve_metrics(). url: what to scrape. port: where it listens. registry: for metrics of your own."""

    def __init__(self, registry: CollectorRegistry, server: WSGIServer, thread: threading.Thread) -> None:
        self.registry = registry
        self._server = server
        self._thread = thread
        host = str(server.server_address[0])
        self.port = server.server_port
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.port}/metrics"
        self._closed = False

    def __repr__(self) -> str:
        return f"<MetricsServer {'closed' if self._closed else self.url}>"

    def close(self) -> None:
        """Stops listening and joins the thread; scrapes under way are cut off. Idempotent; one thread at a time."""
        if self._closed:
            return
        self._closed = True
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> MetricsServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def serve_metrics(
    *observed: Engine | Collector, port: int = DEFAULT_PORT, host: str = "127.0.0.1", peers_max: int = PEERS_MAX,
    patience_s: float = PATIENCE_S,
) -> MetricsServer:  # fmt: skip
    """Serves the metrics of these over HTTP, from a thread of its own, until it is closed.

    observed: engines, and collectors of prometheus_client: crossrail.weights.services.metrics.UpdateCollector,
    crossrail.moe.metrics.RoundCollector, your own. port: 0: any that is free. host: address to listen at, of this host;
    "0.0.0.0" is all of them, and then anybody who reaches it reads names of peers and how much they move.
    peers_max: of each engine, see EngineCollector. patience_s: a client that sends, or takes, nothing for so long is
    cut off: each has a thread.

    Engines stay the caller's, and may close before it. Raises TransportError when it cannot listen there, UsageError
    for two engines of one name, a port out of 0..65535, and what is neither engine nor collector.
    """
    for each in observed:
        if not isinstance(each, Engine) and not callable(getattr(each, "collect", None)):
            raise UsageError(f"observed are engines and collectors, one after the other, not {type(each).__name__}")
    _options.check_texts(host=host)
    _options.check_whole(port=port)
    port = operator.index(port)
    if not 0 <= port <= 65535:
        raise UsageError(f"port is {port}, must be in 0..65535")
    registry = CollectorRegistry()
    registry.register(EngineCollector(*(each for each in observed if isinstance(each, Engine)), peers_max=peers_max))
    for each in observed:
        if not isinstance(each, Engine):
            registry.register(each)
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        raise TransportError(
            "bind", error.errno or 0, f"cannot serve metrics at {host}:{port}: {reason}", "choose another port, or 0"
        ) from None
    server.RequestHandlerClass = _hardened(server.RequestHandlerClass, patience_s)
    return MetricsServer(registry, server, thread)


def _hardened(handler: Any, patience_s: float) -> Any:
    """That of prometheus_client waits for ever for a request, complains of clients that are gone, and trusts them."""

    class Hardened(handler):  # type: ignore[misc]  # a private class of prometheus_client, known at run time only
        timeout = patience_s

        def handle(self) -> None:
            with contextlib.suppress(TimeoutError, ConnectionError):
                super().handle()

        def get_environ(self) -> dict[str, Any]:
            environ: dict[str, Any] = super().get_environ()
            if _BAD_VERSION.search(environ.get("HTTP_ACCEPT", "")):
                del environ["HTTP_ACCEPT"]  # who asks for what cannot be gets the default
            return environ

    return Hardened
