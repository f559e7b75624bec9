"""How the front answers a request that it refuses or fails: with OpenAI's error body, and any status.

    {"error": {"message": "in words", "type": "invalid_request_error", "param": "max_tokens", "code": 400}}

param: the offending field of the body, if there is one. code: the HTTP status, also where none can be sent any more
because a stream has begun.
"""

from __future__ import annotations

import re
from typing import Any

from crossrail._extras import needs
from crossrail.errors import UsageError

with needs(__name__, "'crossrail[kv]'"):
    from aiohttp import web

_TYPES = {429: "rate_limit_error"}
# Patterns of msgspec's messages: "... - at `$.prompt[0]`", which may follow others; "... unknown field `tools`", "...
# missing required field `prompt`".
_PLACE, _FIELD = re.compile(r"`\$\.(\w+)"), re.compile(r"field `(\w+)`")


class FieldError(UsageError):
    """The body, or a header, is wrong or not supported; param: the body's field to blame, if it is one. HTTP 400."""

    def __init__(self, words: str, param: str | None) -> None:
        super().__init__(words)
        self.param = param

    @classmethod
    def of_json(cls, error: Exception) -> FieldError:
        """The error for an exception that decoding the body has raised."""
        if isinstance(error, UnicodeDecodeError):
            return cls("the body is no JSON: it is not in UTF-8", None)
        words = str(error)
        if (found := _PLACE.search(words) or _FIELD.search(words)) is not None:
            return cls(words, found[1])
        return cls(f"the body is no JSON object: {words}", None)


def error_object(status: int, words: str, param: str | None = None) -> dict[str, Any]:
    kind = _TYPES.get(status) or ("server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": words, "type": kind, "param": param, "code": status}}


def refusal(status: int, words: str, param: str | None = None) -> web.Response:
    """A complete error answer."""
    headers = {"Retry-After": "1"} if status in (429, 503) else None
    return web.json_response(error_object(status, words, param), status=status, headers=headers)
