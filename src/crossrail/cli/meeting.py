"""How shells on two hosts find each other: a serve tells its engine's address to whoever knows the secret.

One question per connection. 1. serve: a nonce. 2. asker: a nonce of its own, and a proof over both that it knows the
secret. 3. serve: its address, with a proof over both nonces and the address - or a refusal in words. So a stranger
learns nothing but that a serve is there, and nobody else's address is taken for the serve's.
What is pushed then travels between engines, which have a handshake of their own under the same secret.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hmac
import logging
import os
import secrets
import socket
import struct
import time
from dataclasses import dataclass
from types import TracebackType

import crossrail as xr
from crossrail._options import SECRET_VARIABLE
from crossrail.cli.places import parse_place
from crossrail.control.deadlines import in_time
from crossrail.errors import CrossrailError, UsageError

log = logging.getLogger("crossrail.cli.meeting")

DEFAULT_PORT = 7312
SCHEME = "tcp://"
_VERSION = 1
_NONCE_BYTES = 16
_PROOF_BYTES = 32
_ADDRESS_BYTES_MAX = 4096
_TEXT_BYTES_MAX = 256
_OPENING = struct.Struct(f"<4sH{_NONCE_BYTES}s")
_QUESTION = struct.Struct(f"<4sH{_NONCE_BYTES}s{_PROOF_BYTES}s")
_ANSWER = struct.Struct(f"<BH{_PROOF_BYTES}s")  # granted, bytes that follow, proof
_DEADLINE_S = 5.0  # of one question, from the first byte to the last
_ASKERS_MAX = 64
_BACKLOG = 32
_ACCEPT_PAUSE_S = 0.2


def _proof(secret: bytes, role: bytes, *parts: bytes) -> bytes:
    return hmac.digest(secret, b"crossrail meeting " + role + b"\0" + b"".join(parts), "sha256")


@dataclass(frozen=True)
class Kind:
    """What is being looked for: magic tells kinds apart. start: what to type to start one at `port`."""

    magic: bytes
    name: str
    start: str


SERVE = Kind(b"XRMT", "crossrail serve", "crossrail serve --listen {port}")


class Meeting:
    """A port at which a serve answers askers. An asynchronous context manager; everything runs on its loop."""

    def __init__(
        self, port: int, secret: bytes, address: xr.Address, *, host: str | None = None, kind: Kind = SERVE
    ) -> None:
        """secret: not empty. host: the one address to listen at; None: all."""
        assert secret
        self._host = host
        self._magic = kind.magic
        self._port = port
        self._secret = secret
        self._address = address.to_bytes()
        self._askers: set[asyncio.Task[None]] = set()
        self._told_of_limit = False

    @property
    def port(self) -> int:
        """The port that it listens on: the requested one, or the kernel's choice for 0."""
        return int(self._listener.getsockname()[1])

    async def __aenter__(self) -> Meeting:
        try:
            self._listener = _listening_socket(self._host, self._port)
        except OSError as error:
            where = f"port {self._port}" if self._host is None else f"{self._host} port {self._port}"
            raise CrossrailError(f"cannot listen on {where}: {_reason(error)}; choose another") from None
        self._listener.setblocking(False)
        self._accepting = asyncio.ensure_future(self._accept())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        tasks = [self._accepting, *self._askers]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._listener.close()

    async def _accept(self) -> None:
        # asyncio's own server logs a traceback for each connection that finds no descriptor left, hundreds a second.
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except ConnectionAbortedError:
                continue
            except OSError as error:
                self._tell_of_limit(error)
                await asyncio.sleep(_ACCEPT_PAUSE_S)
                continue
            if len(self._askers) >= _ASKERS_MAX:
                connection.close()
                continue
            try:
                reader, writer = await asyncio.open_connection(sock=connection)
            except OSError:  # it is gone again
                connection.close()
                continue
            asker = asyncio.ensure_future(self._admit(reader, writer))
            self._askers.add(asker)
            asker.add_done_callback(self._askers.discard)

    def _tell_of_limit(self, error: OSError) -> None:
        if not self._told_of_limit:
            self._told_of_limit = True
            advice = (
                "; raise the limit on open files (ulimit -n)" if error.errno in (errno.EMFILE, errno.ENFILE) else ""
            )
            # Worded as the engine's message for its own ports.
            log.error("cannot accept more connections: %s%s. Reported once", error.strerror, advice)

    async def _admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            # A stranger's nonsense, silence or reset is no event: the connection ends.
            with contextlib.suppress(OSError, asyncio.TimeoutError, asyncio.IncompleteReadError):
                await in_time(self._answer(reader, writer), _DEADLINE_S)
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ours = secrets.token_bytes(_NONCE_BYTES)
        writer.write(_OPENING.pack(self._magic, _VERSION, ours))
        magic, version, theirs, proof = _QUESTION.unpack(await reader.readexactly(_QUESTION.size))
        if magic != self._magic:
            return
        if version != _VERSION:
            _refuse(writer, f"it speaks version {_VERSION} of this question, you {version}")
        elif not hmac.compare_digest(proof, _proof(self._secret, b"asks", ours, theirs)):
            _refuse(writer, "you do not have its secret")
        else:
            signed = _proof(self._secret, b"answers", ours, theirs, self._address)
            writer.write(_ANSWER.pack(1, len(self._address), signed) + self._address)
        await writer.drain()


def _reason(error: OSError) -> str:
    """Python adds the address to that of a bind()."""
    return os.strerror(error.errno) if error.errno and error.errno > 0 else str(error.strerror or error)


def _listening_socket(at: str | None, port: int) -> socket.socket:
    """None: on all addresses of this host, of both families where there are two."""
    if at is not None:
        try:
            family, _, _, _, place = socket.getaddrinfo(at, port, type=socket.SOCK_STREAM)[0]
        except UnicodeError:
            raise UsageError(f"{at!r} is not the name of a host") from None
        # All of it: an IPv6 address may be of one interface, as in fe80::1%eth0.
        return socket.create_server(place, family=family, backlog=_BACKLOG)
    both = socket.has_dualstack_ipv6()
    family, host = (socket.AF_INET6, "::") if both else (socket.AF_INET, "0.0.0.0")
    return socket.create_server((host, port), family=family, backlog=_BACKLOG, dualstack_ipv6=both)


def _refuse(writer: asyncio.StreamWriter, text: str) -> None:
    data = text.encode()
    writer.write(_ANSWER.pack(0, len(data), bytes(_PROOF_BYTES)) + data)


def split_url(url: str) -> tuple[str, int, str]:
    """`tcp://HOST[:PORT]/DST` -> (host, port, dst). DST is taken literally. UsageError if it is malformed."""
    authority, _, dst = url.removeprefix(SCHEME).partition("/")
    try:
        host, port = parse_place(authority, default_port=DEFAULT_PORT)
    except UsageError as error:
        raise UsageError(f"{url} is not a URL like {SCHEME}HOST:PORT/DST: {error}") from None
    return host, port, dst


def ask(host: str, port: int, secret: bytes, kind: Kind = SERVE) -> xr.Address:
    """The address of the engine of the serve of that kind there. Blocks for at most some seconds.

    UsageError without a secret, for what is not the name of a host, and when the serve does not know the secret;
    CrossrailError when nothing answers there, or something else does.
    """
    if not secret:
        raise UsageError(f"the server at {host} requires the secret that it printed: set {SECRET_VARIABLE} to it")
    where = f"{host} port {port}"
    try:
        with socket.create_connection((host, port), _DEADLINE_S) as connection:
            try:
                return _ask(_Bounded(connection), where, secret, kind)
            except TimeoutError:
                raise CrossrailError(
                    f"{where} accepts connections but says nothing: not a {kind.name} (wrong port?), "
                    "or one that is stopped"
                ) from None
    except TimeoutError:
        raise CrossrailError(f"no answer from {where}: the host is down, or a firewall drops the packets") from None
    except ConnectionRefusedError:
        raise CrossrailError(
            f"no {kind.name} listens at {where}; start one there with: {kind.start.format(port=port)}"
        ) from None
    except OSError as error:
        raise CrossrailError(f"{where} cannot be reached: {error.strerror or error}") from None
    except UnicodeError:
        raise UsageError(f"{host!r} is not the name of a host") from None


class _Bounded:
    """A connection with one deadline for its whole life, however slowly the other side sends."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._deadline = time.monotonic() + _DEADLINE_S

    def _until_deadline(self) -> socket.socket:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._connection.settimeout(left)
        return self._connection

    def read(self, count: int) -> bytes:
        """Exactly so many bytes; EOFError when there are fewer."""
        data = b""
        while len(data) < count:
            more = self._until_deadline().recv(count - len(data))
            if not more:
                raise EOFError
            data += more
        return data

    def write(self, data: bytes) -> None:
        """Writes all of it."""
        self._until_deadline().sendall(data)


def _ask(connection: _Bounded, where: str, secret: bytes, kind: Kind) -> xr.Address:
    try:
        magic, version, theirs = _OPENING.unpack(connection.read(_OPENING.size))
        if magic != kind.magic:
            raise CrossrailError(f"{where} is not a {kind.name}: wrong port?")
        ours = secrets.token_bytes(_NONCE_BYTES)
        connection.write(_QUESTION.pack(kind.magic, _VERSION, ours, _proof(secret, b"asks", theirs, ours)))
        granted, length, signed = _ANSWER.unpack(connection.read(_ANSWER.size))
        if length > (_ADDRESS_BYTES_MAX if granted else _TEXT_BYTES_MAX):
            raise CrossrailError(f"{where} answers with {length} bytes: not a {kind.name} of this version")
        data = connection.read(length)
    except EOFError:
        raise CrossrailError(f"{where} hung up: not a {kind.name}, or it has too many clients") from None
    if not granted:
        text = "".join(c for c in data.decode(errors="replace") if c.isprintable())
        raise UsageError(f"the server at {where} refuses: {text}")
    if version != _VERSION or not hmac.compare_digest(signed, _proof(secret, b"answers", theirs, ours, data)):
        raise UsageError(f"the server at {where} does not have our secret")
    return xr.Address.from_bytes(data)
