"""Where decoders find the ranks of a prefiller: a table behind HTTP, at the address that SGLang's router hands out.

    PUT /route      a rank's line, sealed with the secret (RankLine), and one of overdue rooms; again every register_s.
                    Answered by what it has to know of halves of requests (halves.py)
    PUT /refused    likewise, what a decode server has refused
    PUT /held       likewise, the rooms that a decode server has
    POST /recompute a decoder's request to compute KV again, likewise (recompute.py)
    GET /route      the lines of all ranks, as JSON, to whoever proves to know the secret; 503 until all are there
    GET /health     200

The server cannot make lines, and believes none: it checks the seal of what comes, and decoders check it again.
Who reads the network reads addresses: nothing is encrypted. What the server knows, ranks tell it again after a restart.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from typing import Annotated, Any

import aiohttp
import msgspec
from aiohttp import web
from msgspec import Meta, Struct

from crossrail.errors import CrossrailError, UsageError
from crossrail.integrations.instance import Instance, Worker, opened_line, sealed_line
from crossrail.integrations.loop_thread import LoopThread
from crossrail.integrations.sglang import halves, recompute
from crossrail.integrations.sglang.halves import HELD_MAX, Halves, Held, Overdue, Refused, refusal
from crossrail.integrations.sglang.recompute import OwnServer, Wishes
from crossrail.integrations.sglang.state import unusable_room
from crossrail.kv import messages as m
from crossrail.kv.http.bodies import BODIES_BYTES_MAX, Bodies
from crossrail.kv.http.listener import PATIENCE_S, Listener

log = logging.getLogger("crossrail.sglang")
_http_log = logging.getLogger("crossrail.sglang.http")

_PURPOSE = b"crossrail sglang rank"
_TOKEN_PURPOSE = b"crossrail sglang bootstrap"
LINE_BYTES_MAX = 64 << 10
_RANKS_MAX = 1024
LEASE = 3.0  # of a line, in register_s
_PATIENCE_S = 10.0  # for the loop to begin or stop listening
PATH = "/route"
REFUSED_PATH = "/refused"
HELD_PATH = "/held"
_SAME_SECRET = "set the same CROSSRAIL_SECRET, or secret_file, at all servers"
_OUR_STATUSES = (401, 403, 503)  # what a BootstrapServer answers when it does not say yes


class NoInstance(CrossrailError):
    """The bootstrap server does not answer, or does not know all ranks of its prefiller now."""


class RankLine(Struct, frozen=True):
    """What a prefiller's rank says about itself. lease_s: how long it holds, unless said again.

    dp_rank: of dp copies of the prefiller, each with tp ranks, of which each takes some of the rooms.
    """

    worker: Worker
    rank: Annotated[int, Meta(ge=0, lt=_RANKS_MAX)]
    tp: Annotated[int, Meta(ge=1, le=_RANKS_MAX)]
    lease_s: m.Seconds
    dp_rank: Annotated[int, Meta(ge=0, lt=_RANKS_MAX)] = 0
    dp: Annotated[int, Meta(ge=1, le=_RANKS_MAX)] = 1

    def to_line(self, secret: bytes) -> str:
        return sealed_line(msgspec.msgpack.encode(self), secret, _PURPOSE)

    @classmethod
    def from_line(cls, line: str, secret: bytes) -> RankLine:
        """Raises UsageError for anything that nobody with the secret has made."""
        try:
            found = msgspec.msgpack.decode(opened_line(line, secret, _PURPOSE), type=cls)
        except msgspec.MsgspecError as error:
            raise UsageError(f"malformed line of a rank: {error}") from None
        if found.rank >= found.tp or found.dp_rank >= found.dp:
            raise UsageError(f"rank={found.rank} of TP {found.tp}, dp_rank={found.dp_rank} of DP {found.dp}")
        return found

    @property
    def place(self) -> tuple[int, int]:
        """Copies one after the other, and the ranks in each."""
        return self.dp_rank, self.rank

    @property
    def size(self) -> tuple[int, int]:
        return self.dp, self.tp


def token(secret: bytes) -> str:
    """Proves to the server that the sender knows the secret."""
    return hmac.digest(secret, _TOKEN_PURPOSE, "sha256").hex()


class RankTable:
    """The lines of one prefiller's ranks. Threads: one."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._lines: dict[tuple[int, int], tuple[str, RankLine, float]] = {}  # by place, and until when

    def put(self, line: str, now_s: float) -> RankLine:
        """Raises UsageError for what is no line. A rank of another TP or DP empties the table first."""
        said = RankLine.from_line(line, self._secret)
        if any(known.size != said.size for _, known, _ in self._lines.values()):
            self._lines.clear()
        self._lines[said.place] = (line, said, now_s + said.lease_s)
        return said

    def lines(self, now_s: float) -> list[str] | None:
        """The lines of all ranks, by place. None: some are not there now."""
        self._lines = {place: entry for place, entry in self._lines.items() if entry[2] > now_s}
        dp, tp = next((said.size for _, said, _ in self._lines.values()), (0, 0))
        if not self._lines or len(self._lines) < dp * tp:
            return None
        return [self._lines[place][0] for place in sorted(self._lines)]


class BootstrapServer:
    """Runs in a thread of its own. Raises what binding raises. close() is idempotent. patience_s: of Listener.

    server: whose it is, which computes KV again.
    """

    def __init__(self, host: str, port: int, secret: bytes, server: OwnServer, patience_s: float = PATIENCE_S) -> None:
        self._server = server
        self._wishes = Wishes(secret)
        self._computing: set[asyncio.Task[Any]] = set()
        self._long_bodies = Bodies(patience_s, recompute.LINE_BYTES_MAX, BODIES_BYTES_MAX)
        self._table = RankTable(secret)
        self._secret = secret
        self._halves = Halves()
        self._authorization = f"Bearer {token(secret)}"
        self._listener = Listener(patience_s, body_bytes_max=LINE_BYTES_MAX)
        self._is_open = True
        self._loop = LoopThread("crossrail-bootstrap")
        try:
            self._loop.call(self._open(host, port), _PATIENCE_S)
        except BaseException:
            self._loop.close()
            raise

    async def _open(self, host: str, port: int) -> None:
        app = web.Application()
        route = self._listener.route
        app.add_routes([route("PUT", PATH, self._put), route("GET", PATH, self._get)])
        app.add_routes([route("GET", "/health", self._health), route("PUT", REFUSED_PATH, self._refused)])
        app.add_routes([route("PUT", HELD_PATH, self._hold)])
        app.add_routes([route("POST", recompute.PATH, self._recompute, is_long=True)])
        await self._listener.start(app, host, port, _http_log)

    def close(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        try:
            self._loop.call(self._end(), _PATIENCE_S)
        finally:
            self._loop.close()

    async def _end(self) -> None:
        for task in self._computing:
            task.cancel()
        await self._listener.close()

    def watch(self) -> None:
        """From now on come() tells of every room that comes. Any thread."""
        self._halves.sees_all = True

    def come(self, room: int) -> None:
        """A request of that room has come to this server. Any thread."""
        if self._is_open:
            self._loop.soon(self._halves.come, room)

    def refuse(self, room: int, why: str) -> None:
        """This server has refused the request of that room: decoders learn it from its ranks. Any thread."""
        if self._is_open and not unusable_room(room):
            self._loop.soon(self._halves.add, refusal(room, why), time.monotonic())

    async def _put(self, request: web.Request) -> web.Response:
        try:
            async with self._listener.bodies.read(request) as body:
                line, _, more = body.decode("latin-1").partition("\n")  # any bytes are text, and refused if no lines
            now_s = time.monotonic()
            lease_s = self._table.put(line.strip(), now_s).lease_s
            if more.strip():
                self._halves.look_for(Overdue.from_line(more.strip(), self._secret), now_s, lease_s)
        except UsageError as error:
            return web.Response(status=403, text=f"{error}\n")
        return web.Response(text=halves.to_line(self._halves.recent(now_s, lease_s), self._secret))

    async def _refused(self, request: web.Request) -> web.Response:
        try:
            async with self._listener.bodies.read(request) as body:
                refusals = halves.from_line(body.decode("latin-1"), self._secret)
        except UsageError as error:
            return web.Response(status=403, text=f"{error}\n")
        for refused in refusals:
            self._halves.add(msgspec.structs.replace(refused, by_decoder=True), time.monotonic())
        return web.Response()

    async def _hold(self, request: web.Request) -> web.Response:
        try:
            async with self._listener.bodies.read(request) as body:
                held = Held.from_line(body.decode("latin-1"), self._secret)
        except UsageError as error:
            return web.Response(status=403, text=f"{error}\n")
        self._halves.hold(held, time.monotonic())
        return web.Response()

    async def _get(self, request: web.Request) -> web.Response:
        if refusal := self._stranger(request):
            return refusal
        lines = self._table.lines(time.monotonic())
        if lines is None:
            return web.Response(status=503, text="not all ranks of the prefiller are here: it is starting, or gone\n")
        return web.json_response(lines)

    def _stranger(self, request: web.Request) -> web.Response | None:
        """The refusal of a client that does not prove to know the secret."""
        said = request.headers.get("Authorization", "")
        if hmac.compare_digest(said.encode(errors="surrogateescape"), self._authorization.encode()):
            return None
        return web.Response(
            status=401, text=f"this server and the one that asks have different secrets: {_SAME_SECRET}\n"
        )

    async def _recompute(self, request: web.Request) -> web.Response:
        if refusal := self._stranger(request):
            return refusal
        try:
            async with self._long_bodies.read(request) as body:
                wanted = self._wishes.request_of(body.decode("latin-1"))
        except UsageError as error:
            return web.Response(status=403, text=f"{error}\n")
        if (task := asyncio.current_task()) is not None:
            self._computing.add(task)
            task.add_done_callback(self._computing.discard)
        status, said = await self._server.generate(wanted)
        return web.Response(status=status, text=f"{said}\n" if status >= 400 else "")

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(text="OK\n")


async def register(
    address: str, line: str, secret: bytes, timeout_s: float, overdue: Overdue | None = None
) -> list[Refused]:
    """Tells a server ("host:port") of a rank. Raises NoInstance when it does not take it."""
    lines = f"{line}\n{overdue.to_line(secret)}" if overdue and (overdue.rooms or overdue.unasked) else line
    answer = await _ask("PUT", address, timeout_s, data=lines)
    try:
        return halves.from_line(answer.decode("latin-1"), secret)
    except UsageError as error:
        raise NoInstance(f"a bootstrap server answers with something else than crossrail's: {error}") from None


async def tell_refused(address: str, room: int, why: str, secret: bytes, timeout_s: float) -> None:
    """A decode server has refused its half of this room's request. Raises NoInstance when nobody hears it."""
    line = halves.to_line([refusal(room, why, by_decoder=True)], secret)
    await _ask("PUT", address, timeout_s, path=REFUSED_PATH, data=line)


async def tell_held(address: str, rooms: list[int], secret: bytes, timeout_s: float) -> None:
    """A decode server has requests of these rooms. Raises NoInstance when nobody hears it."""
    for first in range(0, len(rooms), HELD_MAX):
        line = Held(rooms[first : first + HELD_MAX]).to_line(secret)
        await _ask("PUT", address, timeout_s, path=HELD_PATH, data=line)


async def find_instances(address: str, secret: bytes, timeout_s: float) -> list[Instance]:
    """The prefiller behind a server ("host:port"), of which there may be copies, by dp_rank.

    Raises NoInstance, and UsageError for lines of nobody we know.
    """
    headers = {"Authorization": f"Bearer {token(secret)}"}
    body = await _ask("GET", address, timeout_s, headers=headers)
    try:
        lines = msgspec.json.decode(body, type=Annotated[list[str], Meta(min_length=1, max_length=_RANKS_MAX)])
    except msgspec.MsgspecError as error:
        raise NoInstance(f"{address} did not answer with a list of lines: {error}") from None
    said = [RankLine.from_line(line, secret) for line in lines]
    dp, tp = said[0].size
    if [one.place for one in said] != [(dp_rank, rank) for dp_rank in range(dp) for rank in range(tp)]:
        raise NoInstance(f"{address} knows ranks {[one.place for one in said]} of DP {dp}, TP {tp}")
    if any(one.worker.layout != said[0].worker.layout or one.worker.form != said[0].worker.form for one in said):
        raise NoInstance(f"{address}: ranks of the prefiller have different caches; they may be restarting")
    workers = [one.worker for one in said]
    return [Instance(address[:128], workers[dp_rank * tp : (dp_rank + 1) * tp]) for dp_rank in range(dp)]


async def _ask(
    method: str,
    address: str,
    timeout_s: float,
    *,
    path: str = PATH,
    data: str | None = None,
    headers: dict[str, str] | None = None,
) -> bytes:
    url = f"http://{address}{path}"
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.request(method, url, data=data, headers=headers) as response,
        ):
            body = bytearray()
            async for piece in response.content.iter_chunked(LINE_BYTES_MAX):
                body += piece
                if len(body) > _RANKS_MAX * LINE_BYTES_MAX:
                    raise NoInstance(f"{url} answers without end")
            if response.status != 200:
                said = bytes(body[:500]).decode(errors="replace").strip()
                if response.status not in _OUR_STATUSES:
                    said += "; that is not crossrail's bootstrap server: start it with the same transfer backend"
                raise NoInstance(f"{url} answered {response.status}: {said}")
            return bytes(body)
    except asyncio.TimeoutError:
        raise NoInstance(f"{url} has not answered within {timeout_s:g} s") from None
    except aiohttp.ClientConnectorError as error:
        raise NoInstance(
            f"nobody listens at {address} ({error.os_error}): is the prefill server running, and is that its "
            "--disaggregation-bootstrap-port?"
        ) from None
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise NoInstance(f"{url}: {type(error).__name__} {error}") from None
