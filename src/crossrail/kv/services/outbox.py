"""What a decoder sends its routers: pieces of several requests that are ready together travel in one message."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import NamedTuple

from crossrail.control.mailbox import Mailbox, NoAnswer
from crossrail.control.wire import Unreachable
from crossrail.kv import messages as m

log = logging.getLogger("crossrail.kv")

# Of a message, so that it is one packet: a piece of 4096 tokens takes 16 KiB, and a span of a timeline some 60 bytes.
_BYTES_MAX = 40_000
_PIECE_BYTES, _SPAN_BYTES = 256, 100  # beside its tokens, its name among them; and for each span, named as they are


class _Piece(NamedTuple):
    tokens: m.Tokens
    wanted: asyncio.Future[bool | None]


class Outbox:
    """Threads: the event loop's.

    A model gives a token to each request of a batch at once, and a message for each would cost more than all else that
    is done for a token. So pieces wait for the end of the turn of the event loop in which the first of them came, and
    for nothing else: not for other requests, nor for answers to earlier messages. A message that is lost or late holds
    up the pieces that are in it. timeout_s: of a message.
    """

    def __init__(self, mailbox: Mailbox, timeout_s: float) -> None:
        self._mailbox = mailbox
        self._timeout_s = timeout_s
        self._ready: dict[bytes, list[_Piece]] = {}  # by router

    async def offer(self, router: bytes, tokens: m.Tokens) -> bool | None:
        """Whether it wants the request they are of; None when there was no answer. At most one at a time of a request.

        What Mailbox.ask raises beside NoAnswer and Unreachable is raised.
        """
        loop = asyncio.get_running_loop()
        wanted: asyncio.Future[bool | None] = loop.create_future()
        ready = self._ready.get(router)
        if ready is None:
            ready = self._ready[router] = []
            loop.call_soon(self._send, router)
        ready.append(_Piece(tokens, wanted))
        return await wanted

    def _send(self, router: bytes) -> None:
        for pieces in _messages(self._ready.pop(router)):
            self._mailbox.spawn(self._ask(router, pieces), f"tokens of {len(pieces)} requests")

    async def _ask(self, router: bytes, pieces: list[_Piece]) -> None:
        try:
            answers = await self._answers(router, [piece.tokens for piece in pieces])
        except (NoAnswer, Unreachable) as error:
            what = pieces[0].tokens.request if len(pieces) == 1 else f"{len(pieces)} requests"
            log.info("tokens of %s were not taken: %s", what, error)
            answers = [None] * len(pieces)
        except asyncio.CancelledError:
            for piece in pieces:
                piece.wanted.cancel()
            raise
        except Exception as error:
            for piece in pieces:
                if not piece.wanted.done():
                    piece.wanted.set_exception(error)
            return
        for piece, answer in zip(pieces, answers, strict=True):
            if not piece.wanted.done():  # else who waited for it was cancelled
                piece.wanted.set_result(answer)

    async def _answers(self, router: bytes, pieces: list[m.Tokens]) -> list[bool | None]:
        if len(pieces) == 1:
            return [(await self._mailbox.ask(router, pieces[0], m.Taken, self._timeout_s)).wanted]
        answer = await self._mailbox.ask(router, m.TokensOfSeveral(pieces), m.TakenOfSeveral, self._timeout_s)
        if len(answer.wanted) != len(pieces):
            raise NoAnswer(f"{len(answer.wanted)} answers to the tokens of {len(pieces)} requests")
        return list(answer.wanted)


def _messages(pieces: list[_Piece]) -> Iterator[list[_Piece]]:
    """In their order, as few messages as their lengths allow."""
    message: list[_Piece] = []
    length = 0
    for piece in pieces:
        own = _length(piece.tokens)
        if message and (length + own > _BYTES_MAX or len(message) == m.PIECES_MAX):
            yield message
            message, length = [], 0
        message.append(piece)
        length += own
    yield message


def _length(tokens: m.Tokens) -> int:
    length = _PIECE_BYTES + len(tokens.tokens)
    return length if tokens.end is None else length + len(tokens.end.detail) + _SPAN_BYTES * len(tokens.end.timeline)
