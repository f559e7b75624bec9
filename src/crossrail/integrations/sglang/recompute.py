"""A request to a prefill server, from its decoder: KV of a request that SGLang has retracted, computed anew.

SGLang retracts before weights are updated. The request keeps the tokens that it has; their KV comes once more, in the
same room, as if it were a new prompt.
"""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp

_SAID_MAX = 500
_WANTS_KEY = "; it was asked without a key: retracted requests need a prefill server without --api-key"
_WANTS_TLS = "; has the server ended, or has it TLS (--ssl-certfile)? Retracted requests need one without"


async def asked(url: str, request: dict[str, Any], timeout_s: float) -> str:
    """Empty once the server has confirmed it; otherwise the reason. request: as SGLang's /generate takes it."""
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.post(url, json=request) as response,
        ):
            if response.status < 400:
                await response.read()
                return ""
            said = await response.content.read(_SAID_MAX)
            hint = _WANTS_KEY if response.status in (401, 403) else ""
            return f"{url} answered {response.status}: {said.decode(errors='replace').strip()}{hint}"
    except asyncio.TimeoutError:
        return f"{url} has not answered within {timeout_s:g} s"
    except aiohttp.ClientConnectorError as error:
        return f"nobody listens at {url} ({error.os_error})"
    except (aiohttp.ClientError, OSError, ValueError) as error:
        return f"{url}: {type(error).__name__} {error}{_WANTS_TLS}"
