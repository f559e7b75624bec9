"""What a prefill server refuses before its ranks hear of it: the decoder that has the other half must not wait for it.

Requests that are too long, too many or malformed end in SGLang's HTTP process, or before its scheduler asks for a
sender. Both ways lead through one generator there, which is watched. The bootstrap server is in the same process; what
it notes goes to the ranks with the answers to their registrations, and from them to the decoder.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

from crossrail.integrations.sglang.hooks import hook_around

MODULE = "sglang.srt.managers.tokenizer_manager"


def hook_front() -> bool:
    """Watches the front of this process, if it has one. Idempotent."""
    return hook_around(MODULE, "TokenizerManager.generate_request", watched)


def watched(
    original: Callable[..., AsyncGenerator[Any, None]], front: Any, request: Any, *more: Any, **named: Any
) -> Any:
    """generate_request of a TokenizerManager. A front without our bootstrap server is left alone."""
    answers = original(front, request, *more, **named)
    refuse = getattr(getattr(front, "bootstrap_server", None), "refuse", None)
    return answers if refuse is None else _telling(answers, request, refuse)


async def _telling(
    answers: AsyncGenerator[Any, None], request: Any, refuse: Callable[[int, str], None]
) -> AsyncIterator[Any]:
    try:
        async with aclosing(answers):  # when a client hangs up, at once, and not by the garbage collector
            async for answer in answers:
                if why := _abort_in(answer):
                    _tell(request, why, refuse)
                yield answer
    except Exception as error:
        _tell(request, str(getattr(error, "detail", error)), refuse)
        raise


def _abort_in(answer: Any) -> str:
    """Why a stream ends with this answer, if SGLang has aborted it."""
    reason = answer.get("meta_info", {}).get("finish_reason") if isinstance(answer, dict) else None
    return str(reason.get("message", "")) if isinstance(reason, dict) and reason.get("type") == "abort" else ""


def _tell(request: Any, why: str, refuse: Callable[[int, str], None]) -> None:
    """Of all rooms of a batch: none of it goes on. Ranks that know a room better than we do take no notice."""
    rooms = getattr(request, "bootstrap_room", None)
    for room in rooms if isinstance(rooms, list) else [rooms]:
        if isinstance(room, int):
            refuse(room, f"the prefill server refused it: {why}")
