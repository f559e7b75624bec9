"""A decoder asks its prefill server to compute the KV of a request again that SGLang has retracted.

SGLang retracts before weights are updated. The request keeps the tokens that it has; their KV comes once more, in the
same room, as if it were a new prompt.

    decoder's rank 0 ── sealed, POST /recompute ──▶ bootstrap server ── POST /generate ──▶ SGLang's server, on the host
                                                    (bootstrap.py)      (OwnServer)        and in the process of the
                                                                                           bootstrap server
The bootstrap server knows its own server's key and whether it has TLS; the decoder needs neither.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import Annotated, Any

import aiohttp
import msgspec
from msgspec import Meta, Struct

from crossrail._latest import Latest
from crossrail.control.messages import clipped
from crossrail.errors import UsageError
from crossrail.integrations.instance import opened_line, sealed_line

PATH = "/recompute"
LINE_BYTES_MAX = 32 << 20  # some million tokens, as JSON in base64
_PURPOSE = b"crossrail sglang recompute"
_SAID_MAX = 500
_REMEMBERED = 4096
_REASON = "crossrail_refused"  # in a payload: why crossrail does not have it computed


class _Wanted(Struct, frozen=True):
    """number: drawn at random; a request is taken once. request: JSON, as SGLang's /generate takes it."""

    number: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
    request: bytes


class OwnServer(Struct, frozen=True):
    """SGLang's server, from its own host. url: of its root. key: of its API, None: it has none."""

    url: str
    key: str | None = None

    async def generate(self, request: bytes) -> tuple[int, str]:
        """Its HTTP status, and what it says. Closing the connection, as a cancellation does, aborts the request."""
        headers = {"Content-Type": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session,
                # Its certificate may be for another name: this never leaves the host.
                session.post(f"{self.url}/generate", data=request, headers=headers, ssl=False) as response,
            ):
                said = await response.content.read(_SAID_MAX)
                return response.status, said.decode(errors="replace").strip()
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return 502, f"{type(error).__name__} {error}"


class Wishes:
    """Opens the lines of decoders. Threads: one."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._seen: Latest[int, None] = Latest(_REMEMBERED)

    def request_of(self, line: str) -> bytes:
        """Raises UsageError for what nobody with the secret has made, and for what came before."""
        try:
            wanted = msgspec.msgpack.decode(opened_line(line, self._secret, _PURPOSE), type=_Wanted)
        except msgspec.MsgspecError as error:
            raise UsageError(f"malformed: {error}") from None
        if wanted.number in self._seen:
            raise UsageError("it came before")
        self._seen[wanted.number] = None
        return wanted.request


async def asked(address: str, request: dict[str, Any], secret: bytes, token: str, timeout_s: float) -> str:
    """Empty once the prefill server has confirmed it; otherwise the reason. address: of its bootstrap server.

    request: as SGLang's /generate takes it. token: bootstrap.token(secret).
    """
    if why := request.get(_REASON):
        return str(why)
    url = f"http://{address}{PATH}"
    line = sealed_line(
        msgspec.msgpack.encode(_Wanted(secrets.randbits(63), msgspec.json.encode(request))), secret, _PURPOSE
    )
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout_s)) as session,
            session.post(url, data=line, headers={"Authorization": f"Bearer {token}"}) as response,
        ):
            said = (await response.content.read(_SAID_MAX)).decode(errors="replace").strip()
            return f"{url} answered {response.status}: {clipped(said)}" if response.status >= 400 else ""
    except asyncio.TimeoutError:
        return f"{url} has not answered within {timeout_s:g} s"
    except aiohttp.ClientConnectorError as error:
        return f"nobody listens at {url} ({error.os_error})"
    except (aiohttp.ClientError, OSError, ValueError) as error:
        return f"{url}: {type(error).__name__} {error}"


def refused(payload: dict[str, Any], why: str) -> dict[str, Any]:
    """The payload of a request that must not be computed again: asked() gives this reason."""
    return payload | {_REASON: why}


def why_not(request: Any) -> str:
    """Why a request of SGLang's (Req) has other KV than its tokens alone would have. Empty: it has not.

    What SGLang sends to the prefill server has the tokens and nothing of this: its KV would be another one, silently.
    """
    for name, what in (
        ("lora_id", "a LoRA adapter"),
        ("multimodal_inputs", "images or other media"),
        ("input_embeds", "embeddings instead of tokens"),
        ("positional_embed_overrides", "embeddings instead of some of its tokens"),
    ):
        if getattr(request, name, None) is not None:
            return f"it has {what}, which SGLang does not send to the prefill server again"
    return ""
