"""An etcd client with just what membership needs: leases, keys attached to them, and watches of a prefix.

It speaks etcd's own JSON gateway (`/v3/...`, in every etcd since 3.4) over aiohttp, which is a dependency anyway. The
Python clients of the gRPC interface are either unmaintained or pull in gRPC. In this JSON 64-bit numbers are strings,
bytes are base64, and fields that are zero are omitted.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from crossrail._extras import needs
from crossrail._latest import Latest
from crossrail.control.deadlines import in_time, loop_time_s
from crossrail.errors import CrossrailError, UsageError
from crossrail.kv.http.client_errors import client_error_text

with needs(__name__, "'crossrail[kv]'"):
    import aiohttp

log = logging.getLogger("crossrail.kv")

_EVENT_BYTES_MAX = 16 << 20
_UNNAMED_KEPT = 1024  # keys that are not text; each is reported once
# gRPC status codes, in an answer's "code".
_CODES = range(1, 17)
_NOT_FOUND = 5
_UNAVAILABLE = 14
# RuntimeError: the session was closed meanwhile.
_TROUBLES = (aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError, RuntimeError)


class EtcdError(CrossrailError):
    """No member of the cluster answers, or the answer is an error. code: the gRPC status, 0 if there was no answer."""

    def __init__(self, message: str, code: int = 0) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Change:
    """A change of one key. value None: the key was deleted, or its lease expired."""

    key: str
    value: bytes | None


class Etcd:
    """Threads: the event loop's. close() it, or use it as a context manager.

    endpoints: "host:port" of members; the one that answered last is asked first. timeout_s: for each request to each
    member.

    Invariant: watches are open at the first of `_endpoints`; any request that finds this member unresponsive ends them.
    """

    def __init__(self, endpoints: Sequence[str], timeout_s: float = 3.0) -> None:
        if not endpoints or not all(endpoints):
            raise UsageError(f"endpoints of etcd {list(endpoints)} must be one or more HOST:PORT")
        self._endpoints = list(endpoints)
        self._timeout_s = timeout_s
        self._watches: set[aiohttp.ClientResponse] = set()
        self._unnamed: Latest[bytes, None] = Latest(_UNNAMED_KEPT)
        self._session = aiohttp.ClientSession()

    async def __aenter__(self) -> Etcd:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Idempotent. Requests in flight fail with EtcdError."""
        await self._session.close()

    async def grant(self, ttl_s: float) -> int:
        """A new lease, which expires ttl_s after its last keep-alive; etcd's minimum is about two seconds."""
        answer = await self._ask("lease/grant", {"TTL": max(1, round(ttl_s))}, "ID")
        return int(answer["ID"])

    async def keep_alive(self, lease: int) -> bool:
        """Renews a lease; False if it has expired."""
        answer = await self._ask("lease/keepalive", {"ID": str(lease)}, "result")
        return int(answer["result"].get("TTL", 0)) > 0

    async def revoke(self, lease: int) -> None:
        """Ends a lease and deletes its keys. A lease that has expired already is no error."""
        try:
            await self._ask("lease/revoke", {"ID": str(lease)})
        except EtcdError as error:
            if error.code != _NOT_FOUND:
                raise

    async def put_if_ours(self, key: str, value: bytes, lease: int) -> bool:
        """Puts a key under a lease if it is absent or has this value already. False: it belongs to somebody else.

        Both in one transaction: an earlier lease of ours may expire at any moment, and the key with it.
        """
        put = {"request_put": _put(key, value, lease)}
        absent = {"key": _b64(key.encode()), "target": "CREATE", "result": "EQUAL", "create_revision": "0"}
        equal = {"key": _b64(key.encode()), "target": "VALUE", "result": "EQUAL", "value": _b64(value)}
        otherwise = {"request_txn": {"compare": [equal], "success": [put]}}
        answer = await self._ask("kv/txn", {"compare": [absent], "success": [put], "failure": [otherwise]})
        if answer.get("succeeded", False):
            return True
        return any(each.get("response_txn", {}).get("succeeded", False) for each in answer.get("responses", []))

    async def has(self, key: str, value: bytes, lease: int) -> bool:
        """Whether the key has this value and belongs to this lease."""
        found = (await self._ask("kv/range", {"key": _b64(key.encode())})).get("kvs", [])
        return any((pair.get("value"), pair.get("lease")) == (_b64(value), str(lease)) for pair in found)

    async def left_s(self, key: str) -> float:
        """Remaining time of a key's lease without keep-alives, rounded down to seconds; 0 if it has no lease."""
        found = (await self._ask("kv/range", {"key": _b64(key.encode())})).get("kvs", [])
        leases = [pair["lease"] for pair in found if "lease" in pair]
        answers = [await self._ask("lease/timetolive", {"ID": lease}) for lease in leases]
        return max([0.0, *(float(answer.get("TTL", 0)) for answer in answers)])

    async def list(self, prefix: str) -> tuple[dict[str, bytes], int]:
        """All keys below a prefix, and the revision of that list. Keys that are not text are skipped."""
        answer = await self._ask("kv/range", _range(prefix))
        try:
            found = {
                key: base64.b64decode(pair.get("value", ""))
                for pair in answer.get("kvs", [])
                if (key := self._text(pair["key"])) is not None
            }
            return found, int(answer["header"]["revision"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise EtcdError(f"what etcd says of {prefix!r} is not etcd's: {client_error_text(error)}") from None

    async def watch(self, prefix: str, revision: int, for_s: float) -> AsyncIterator[Change]:
        """Changes below a prefix after that revision, as they happen, until for_s have passed.

        Keys that are not text are skipped.

        Raises EtcdError, also if etcd has compacted that revision away: list() again. A member that falls silent is not
        noticed here: send it another request now and then.
        """
        endpoint = self._endpoints[0]
        create = {"create_request": {**_range(prefix), "start_revision": str(revision + 1)}}
        timeout = aiohttp.ClientTimeout(total=None)
        deadline_at_s = loop_time_s() + for_s
        try:
            # The response's headers come at once; only the events may take long.
            begun = self._session.post(_url(endpoint, "watch"), json=create, timeout=timeout)
            opened = await in_time(begun, self._timeout_s, undo=aiohttp.ClientResponse.close)
            async with opened as response, self._watching(endpoint, response):
                async for result in _lines(response, deadline_at_s):
                    if result.get("canceled"):
                        raise EtcdError(
                            f"etcd ended the watch of {prefix!r}: {result.get('cancel_reason', 'no reason')}"
                        )
                    for event in result.get("events", []):
                        deleted = event.get("type") == "DELETE"
                        value = None if deleted else base64.b64decode(event["kv"].get("value", ""))
                        if (key := self._text(event["kv"]["key"])) is not None:
                            yield Change(key, value)
        except (*_TROUBLES, KeyError, TypeError, AttributeError) as error:
            raise EtcdError(f"etcd at {endpoint}: {client_error_text(error)}") from None

    def _text(self, encoded: str) -> str | None:
        """A decoded key; None if it is not text. Anybody who can write to etcd may put such keys: they are logged and
        ignored.
        """
        key = base64.b64decode(encoded)
        try:
            return key.decode()
        except UnicodeDecodeError:
            if key not in self._unnamed:
                self._unnamed[key] = None
                log.warning("etcd's key %r is passed over: it is not in UTF-8", key)
            return None

    @asynccontextmanager
    async def _watching(self, endpoint: str, response: aiohttp.ClientResponse) -> AsyncIterator[None]:
        if endpoint != self._endpoints[0]:
            raise EtcdError(f"etcd at {endpoint} did not answer another question meanwhile")
        self._watches.add(response)
        try:
            yield
        finally:
            self._watches.discard(response)

    async def _ask(self, what: str, question: dict[str, Any], wanted: str = "header") -> dict[str, Any]:
        """Asks one member after another until one answers. wanted: a field that every valid answer to this has."""
        timeout = aiohttp.ClientTimeout(total=self._timeout_s)
        troubles = []
        for endpoint in tuple(self._endpoints):
            try:
                async with self._session.post(_url(endpoint, what), json=question, timeout=timeout) as response:
                    answer, status = _object(await response.read()), f"{response.status} {response.reason}"
            except _TROUBLES as error:
                troubles.append(f"{endpoint}: {client_error_text(error)}")
            else:
                if wanted in answer and "error" not in answer:
                    return answer
                if (code := _error_code(answer)) is None:
                    troubles.append(f"{endpoint}: its answer to {what} is not etcd's: {status}")
                elif code != _UNAVAILABLE:
                    raise EtcdError(f"etcd at {endpoint}, {what}: {answer['error']}", code)
                else:
                    troubles.append(f"{endpoint}: {answer['error']}")
            self._pass_over(endpoint)
        # Sorted, because the order of members varies, and the same problem should be reported only once.
        raise EtcdError(f"no member of etcd answers: {'; '.join(sorted(troubles))}")

    def _pass_over(self, endpoint: str) -> None:
        """Moves a member to the end of the order, unless another request that it did not answer has done so already."""
        if endpoint == self._endpoints[0]:
            self._endpoints.append(self._endpoints.pop(0))
            for response in self._watches:
                response.close()


def _object(body: bytes) -> dict[str, Any]:
    """The JSON object; empty if it is not one."""
    try:
        answer: Any = json.loads(body)
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) else {}


def _error_code(answer: dict[str, Any]) -> int | None:
    """The gRPC code of an etcd error, which streams such as lease/keepalive wrap in an object of its own; None if it is
    not one. Proxies have errors of their own, with other codes.
    """
    error = answer.get("error")
    code = error.get("grpc_code") if isinstance(error, dict) else answer.get("code")
    return code if "error" in answer and type(code) is int and code in _CODES else None


def _url(endpoint: str, what: str) -> str:
    return f"http://{endpoint}/v3/{what}"


async def _lines(response: aiohttp.ClientResponse, deadline_at_s: float) -> AsyncIterator[dict[str, Any]]:
    """The results of a stream, one JSON object a line. Ends at deadline_at_s of the loop's clock;
    EtcdError on failure.
    """
    buffer = b""
    while (left_s := deadline_at_s - loop_time_s()) > 0:
        try:
            data = await in_time(response.content.readany(), left_s)
        except asyncio.TimeoutError:
            return
        if not data:
            raise EtcdError("etcd ended the watch")
        *lines, buffer = (buffer + data).split(b"\n")
        if len(buffer) > _EVENT_BYTES_MAX:
            raise EtcdError(f"etcd sent {len(buffer)} bytes of one event")
        for line in lines:
            answer = json.loads(line)
            if "error" in answer:
                raise EtcdError(f"etcd, watch: {answer['error']}")
            yield answer["result"]


def _range(prefix: str) -> dict[str, str]:
    """The range of all keys with this prefix: up to the prefix with its last byte incremented."""
    key = prefix.encode()
    return {"key": _b64(key), "range_end": _b64(key[:-1] + bytes([key[-1] + 1]))}


def _put(key: str, value: bytes, lease: int) -> dict[str, str]:
    return {"key": _b64(key.encode()), "value": _b64(value), "lease": str(lease)}


def _b64(data: bytes) -> str:
    return base64.b64encode(data).decode()
