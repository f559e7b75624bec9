"""An HTTP endpoint with metrics, for Prometheus and `crossrail top`."""

from __future__ import annotations

import contextlib
import errno
import operator
import re
import socket
import threading
from collections.abc import Callable, Iterable
from socketserver import TCPServer, ThreadingMixIn
from typing import Any, cast
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import Metric
from prometheus_client.registry import Collector, RestrictedRegistry

from crossrail import Engine, _options
from crossrail._closing import Closing
from crossrail.errors import TransportError, UsageError
from crossrail.observe.metrics import PEERS_MAX, EngineCollector

DEFAULT_PORT = 9478
PATIENCE_S = 10.0
_PATIENCE_MAX_S = 86400.0
# prometheus_client compares versions as tuples of numbers, and fails where one is anything else.
_BAD_VERSION = re.compile(r"version=(?!\d{1,9}(\.\d{1,9})*\s*([;,]|$))", re.ASCII)


class MetricsServer(Closing):
    """Made by serve_metrics(). url: what to scrape. port: where it listens. registry: for metrics of your own."""

    def __init__(self, registry: CollectorRegistry, server: WSGIServer, thread: threading.Thread) -> None:
        self.registry = registry
        self._server = server
        self._thread = thread
        host = _shown(server.socket.getsockname())
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


def _shown(place: tuple[Any, ...]) -> str:
    """The host of an address; for a link-local IPv6 address with its interface."""
    scope = place[3] if len(place) > 3 else 0
    return f"{place[0]}%{socket.if_indextoname(scope)}" if scope else str(place[0])


def serve_metrics(
    *observed: Engine | Collector, port: int = DEFAULT_PORT, host: str = "127.0.0.1", peers_max: int = PEERS_MAX,
    patience_s: float = PATIENCE_S,
) -> MetricsServer:  # fmt: skip
    """Serves the metrics of these over HTTP, from a thread of its own, until it is closed.

    observed: engines, and collectors of prometheus_client: crossrail.kv.RouterCollector,
    crossrail.weights.UpdateCollector, crossrail.moe.RoundCollector, your own. port: 0: any that is free. host: address
    to listen at, of this host; "0.0.0.0" is all of them, and then anybody who reaches it reads names of peers and how
    much they move.
    peers_max: of each engine, see EngineCollector. patience_s: a client that sends, or takes, nothing for so long is
    cut off: each has a thread.

    Engines stay the caller's, and may close before it. Raises TransportError when it cannot listen there, UsageError
    for two engines of one name, a port out of 0..65535, a host or a time that is none, and what is neither engine nor
    collector.
    """
    for each in observed:
        if not isinstance(each, Engine) and not callable(getattr(each, "collect", None)):
            raise UsageError(f"observed are engines and collectors, one after the other, not {type(each).__name__}")
    _options.check_texts(host=host)
    _options.check_whole(port=port)
    _options.check_numbers(patience_s=patience_s)
    if not 0 < patience_s <= _PATIENCE_MAX_S:
        raise UsageError(f"patience_s is {patience_s}, must be more than 0 and at most {_PATIENCE_MAX_S:g} seconds")
    port = operator.index(port)
    if not 0 <= port <= 65535:
        raise UsageError(f"port is {port}, must be in 0..65535")
    registry = _Registry()
    registry.register(EngineCollector(*(each for each in observed if isinstance(each, Engine)), peers_max=peers_max))
    for each in observed:
        if not isinstance(each, Engine):
            registry.register(each)
    server = _open(host, port)
    server.patience_s = patience_s
    server.set_app(_with_head(make_wsgi_app(registry)))
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()
    return MetricsServer(registry, server, thread)


def _open(host: str, port: int) -> _Server:
    try:
        family, _, _, _, place = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        # All of the place: an IPv6 address may be of one interface, as in fe80::1%eth0.
        return _Server(family, place)
    except UnicodeError:
        raise UsageError(f"host is {host!r}, which is not the name of a host") from None
    except OSError as error:
        reason = error.strerror or str(error)
        raise TransportError(
            "bind", error.errno or 0, f"cannot serve metrics at {host}:{port}: {reason}", _remedy(error)
        ) from None


def _remedy(error: OSError) -> str:
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return 'host is an address of this host, "127.0.0.1", or "0.0.0.0" for all of them'
    return "choose another port, or 0" if error.errno in (errno.EADDRINUSE, errno.EACCES) else ""


def _with_head(app: Any) -> Callable[[dict[str, Any], Any], Iterable[bytes]]:
    """The application, which knows no HEAD: checks of load balancers and `curl -I` get what GET would, without body."""

    def answer(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] != "HEAD":
            return cast("Iterable[bytes]", app(environ, start_response))
        begun: list[Any] = []
        body = b"".join(app({**environ, "REQUEST_METHOD": "GET"}, lambda *args: begun.extend(args)))
        status, headers = begun
        start_response(status, [*headers, ("Content-Length", str(len(body)))])
        return []

    return answer


class _Registry(CollectorRegistry):
    """For collectors that do not declare their metrics: prometheus_client's own registry would skip these when a scrape
    asks for metrics by name, as in `/metrics?name[]=crossrail_transfers_total`.
    """

    def restricted_registry(self, names: Iterable[str]) -> RestrictedRegistry:
        return _Chosen(names, self)


class _Chosen(RestrictedRegistry):
    """Samples of these names, of all that there are."""

    def __init__(self, names: Iterable[str], registry: CollectorRegistry) -> None:
        super().__init__(names, registry)
        self._names = frozenset(names)
        self._all = registry

    def collect(self) -> Iterable[Metric]:
        for metric in self._all.collect():
            chosen = Metric(metric.name, metric.documentation, metric.type, metric.unit)
            chosen.samples = [sample for sample in metric.samples if sample.name in self._names]
            if chosen.samples:
                yield chosen


class _Server(ThreadingMixIn, WSGIServer):
    """A thread for each request, which is not waited for at the end."""

    daemon_threads = True
    patience_s = PATIENCE_S

    def __init__(self, family: socket.AddressFamily, place: Any) -> None:
        self.address_family = family
        super().__init__(place, _Handler)

    def server_bind(self) -> None:
        """Like http.server's, without asking a name server for the name of this host."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def finish_request(self, request: Any, client_address: Any) -> None:
        request.settimeout(self.patience_s)
        super().finish_request(request, client_address)


class _Handler(WSGIRequestHandler):
    """Clients may be silent, gone, or send anything: never waited for, never logged, never trusted."""

    def handle(self) -> None:
        with contextlib.suppress(TimeoutError, ConnectionError):
            super().handle()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its name there
        """Logs nothing: there is a request every few seconds."""

    def get_environ(self) -> dict[str, Any]:
        environ: dict[str, Any] = super().get_environ()
        if _BAD_VERSION.search(environ.get("HTTP_ACCEPT", "")):
            del environ["HTTP_ACCEPT"]  # who asks for what cannot be gets the default
        return environ
