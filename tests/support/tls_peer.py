"""Peers of the tcp transport under TLS, made with Python's ssl: TLS-compliant or not.

Python lacks the channel binding (RFC 9266), so none of these can finish a handshake; tests use that, too.
"""

from __future__ import annotations

import socket
import ssl

import crossrail as xr
from tests.support import tcp_wire as wire
from tests.support.limits import WAIT_S


def client_context(tls: xr.TlsConfig | None, ca: xr.TlsConfig) -> ssl.SSLContext:
    """tls: None: no client certificate. ca: whose `ca` is trusted."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(ca.ca)
    if tls is not None:
        context.load_cert_chain(tls.cert, tls.key)
    return context


def server_context(tls: xr.TlsConfig) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(tls.ca)
    context.load_cert_chain(tls.cert, tls.key)
    return context


def start_tls(target: xr.Address) -> bytes:
    """What an initiator with tls sends first, in plain text."""
    return wire.message(wire.Kind.START_TLS, wire.target_tag(wire.incarnation_of(target.to_bytes())))


def dial(target: xr.Address) -> socket.socket:
    connection = socket.create_connection(wire.endpoints_of(target.to_bytes())[0], WAIT_S)
    connection.settimeout(WAIT_S)
    return connection


class Flights:
    """The initiator's half of TLS in memory: what it sends, flight by flight, as bytes that a test may change."""

    def __init__(self, context: ssl.SSLContext, connection: socket.socket) -> None:
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._in, self._out)
        self._connection = connection

    def hello(self) -> bytes:
        """The first flight."""
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            pass
        return self._out.read()

    def finish(self) -> bytes:
        """Reads the acceptor's flight; the second one."""
        while True:
            try:
                self._tls.do_handshake()
                return self._out.read()
            except ssl.SSLWantReadError:
                data = self._connection.recv(65536)
                assert data, "the acceptor hung up before its flight was over"
                self._in.write(data)

    def sealed(self, data: bytes) -> bytes:
        """`data` as records."""
        self._tls.write(data)
        return self._out.read()
