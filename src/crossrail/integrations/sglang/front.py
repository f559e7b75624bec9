"""What a server refuses before its ranks hear of it: the other server, which has the other half, must not wait for it.

Requests that are too long, too many or malformed end in SGLang's HTTP process, or before its scheduler asks for a
sender or receiver. Both ways lead through one generator there, which is watched; what would end a scheduler is refused
there. At the prefill server the bootstrap
server is in the same process; at the decode server its address comes with the request. What it notes goes to the
prefiller's ranks (halves.py). A decode server's front also tells prefill servers which requests it has.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator
from contextlib import aclosing
from typing import Any, ClassVar, Protocol

from crossrail.errors import CrossrailError
from crossrail.integrations.sglang.bootstrap import NoInstance, tell_held, tell_refused
from crossrail.integrations.sglang.hooks import hook_around
from crossrail.integrations.sglang.options import SglangOptions
from crossrail.integrations.sglang.state import ONE_SAMPLE, unusable_room

log = logging.getLogger("crossrail.sglang")

MODULE = "sglang.srt.managers.tokenizer_manager"
BACKEND = "crossrail"
_TELL_S = 5.0
_NO_HOST = "2.2.2.2"  # SGLang's, of health checks: there is no prefill server
TOP_LOGPROBS_MAX = 128  # of SGLang's MetadataBuffers
SAMPLING_MASK = "SGLANG_ENABLE_DISAGG_SAMPLING_MASK"


def hook_front() -> bool:
    """Watches the front of this process, if it has one. Idempotent."""
    return hook_around(MODULE, "TokenizerManager.generate_request", watched)


class _Watcher(Protocol):
    def come(self, request: Any) -> None: ...

    def refuse(self, request: Any, why: str) -> None: ...

    def go(self, request: Any) -> None:
        """It has ended."""


class _Prefill:
    """bootstrap_server: SGLang's, of our class."""

    def __init__(self, bootstrap_server: Any) -> None:
        self._server = bootstrap_server

    def come(self, request: Any) -> None:
        for room in rooms_of(request):
            self._server.come(room)

    def refuse(self, request: Any, why: str) -> None:
        """Tells of all rooms of a batch: none of it goes on. Ranks that know a room better take no notice."""
        for room in rooms_of(request):
            self._server.refuse(room, f"the prefill server refused it: {why}")

    def go(self, request: Any) -> None: ...


class _Decode:
    """port: of bootstrap servers, for requests that name none."""

    _telling: ClassVar[set[asyncio.Task[None]]] = set()
    _held: ClassVar[dict[str, set[int]]] = {}  # rooms that this server has, by their prefill servers' addresses

    def __init__(self, port: int) -> None:
        self._port = port

    def come(self, request: Any) -> None:
        for room, address in self._halves_of(request):
            if address in self._held:
                self._held[address].add(room)
            else:
                self._held[address] = {room}
                self._keep(_tell_held(address, self._held))

    def refuse(self, request: Any, why: str) -> None:
        for room, address in self._halves_of(request):
            self._keep(_tell_refused(address, room, f"the decode server refused it: {why}"))

    def go(self, request: Any) -> None:
        for room, address in self._halves_of(request):
            self._held.get(address, set()).discard(room)

    def _halves_of(self, request: Any) -> Iterator[tuple[int, str]]:
        """Its rooms, each with the address of the bootstrap server of its other half."""
        rooms = rooms_of(request)
        hosts, ports = (
            _each(getattr(request, name, None), len(rooms)) for name in ("bootstrap_host", "bootstrap_port")
        )
        for room, host, port in zip(rooms, hosts, ports, strict=True):
            if host and host != _NO_HOST and not unusable_room(room):
                yield room, f"{host}:{port or self._port}"

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)


async def _tell_held(address: str, held: dict[str, set[int]]) -> None:
    """Again and again, as long as there are any. A prefill server that misses some waits longer, and nothing else."""
    options = SglangOptions.from_environment()
    try:
        while rooms := held[address]:
            with contextlib.suppress(NoInstance):
                await tell_held(address, sorted(rooms), options.secret(), _TELL_S)
            await asyncio.sleep(options.register_s)
    finally:
        del held[address]


async def _tell_refused(address: str, room: int, why: str) -> None:
    try:
        await tell_refused(address, room, why, SglangOptions.from_environment().secret(), _TELL_S)
    except CrossrailError as error:  # then there is no prefill server that waits, or it waits for bootstrap_s
        log.info("room %d: the prefill server at %s does not hear that it was refused: %s", room, address, error)


def _watcher_of(front: Any) -> _Watcher | None:
    """None: this front has another transfer backend than ours, or none."""
    server = getattr(front, "bootstrap_server", None)
    if hasattr(server, "refuse"):
        return _Prefill(server)
    if getattr(getattr(front, "disaggregation_mode", None), "value", None) != "decode":
        return None
    from sglang.srt.runtime_context import get_disagg

    said = get_disagg()
    if said.disaggregation_transfer_backend != BACKEND:
        return None
    return _Decode(said.disaggregation_bootstrap_port)


def watched(
    original: Callable[..., AsyncGenerator[Any, None]], front: Any, request: Any, *more: Any, **named: Any
) -> Any:
    """generate_request of a TokenizerManager."""
    answers = original(front, request, *more, **named)
    watcher = _watcher_of(front)
    if watcher is None:
        return answers
    return _telling(answers, request, watcher)


async def _telling(answers: AsyncGenerator[Any, None], request: Any, watcher: _Watcher) -> AsyncIterator[Any]:
    try:
        watcher.come(request)
        if why := unservable(request):
            raise ValueError(why)  # SGLang answers 400
        async with aclosing(answers):  # when a client hangs up, at once, and not by the garbage collector
            async for answer in answers:
                if why := _abort_in(answer):
                    watcher.refuse(request, why)
                yield answer
    except Exception as error:
        watcher.refuse(request, str(getattr(error, "detail", error)))
        raise
    finally:
        watcher.go(request)


def unservable(request: Any) -> str:
    """Why prefill and decode apart cannot serve this request. Empty: they can.

    n: SGLang gives all samples one room. The others would end SGLang's scheduler, with all other requests: the first
    token's metadata have no place in the buffers that go to the decode server.
    """
    params = getattr(request, "sampling_params", None)
    samples = [one.get("n") or 1 for one in (params if isinstance(params, list) else [params]) if isinstance(one, dict)]
    if rooms_of(request) and any(isinstance(count, int) and count > 1 for count in samples):
        return ONE_SAMPLE
    asked = getattr(request, "top_logprobs_num", None) or 0
    most = max((one or 0 for one in asked), default=0) if isinstance(asked, list) else asked
    if isinstance(most, int) and most > TOP_LOGPROBS_MAX:
        return f"top_logprobs_num={most} must be at most {TOP_LOGPROBS_MAX} where prefill and decode are apart"
    masks = getattr(request, "return_sampling_mask", None)
    wants_masks = any(masks) if isinstance(masks, list) else bool(masks)
    if wants_masks and os.environ.get(SAMPLING_MASK, "").strip().lower() not in ("1", "true", "yes", "y"):
        return f"return_sampling_mask needs {SAMPLING_MASK}=1 at both servers where prefill and decode are apart"
    return ""


def _abort_in(answer: Any) -> str:
    """Why a stream ends with this answer, if SGLang has aborted it."""
    reason = answer.get("meta_info", {}).get("finish_reason") if isinstance(answer, dict) else None
    return str(reason.get("message", "")) if isinstance(reason, dict) and reason.get("type") == "abort" else ""


def rooms_of(request: Any) -> list[int]:
    """Of a request, or of each in a batch; those that are numbers. As SGLang, which numbers on from a batch's one."""
    rooms = getattr(request, "bootstrap_room", None)
    if isinstance(rooms, int):
        return [rooms + i for i in range(_batch_of(request))]
    return [room for room in rooms if isinstance(room, int)] if isinstance(rooms, list) else []


def _batch_of(request: Any) -> int:
    text, tokens = getattr(request, "text", None), getattr(request, "input_ids", None)
    if isinstance(text, list):
        return len(text)
    return len(tokens) if isinstance(tokens, list) and tokens and isinstance(tokens[0], list) else 1


def _each(value: Any, count: int) -> list[Any]:
    """What a batch has for each of `count` requests, or for all of them."""
    return (value + [None] * count)[:count] if isinstance(value, list) else [value] * count
