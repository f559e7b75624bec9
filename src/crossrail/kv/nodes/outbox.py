"""What a decoder sends to its routers: tokens of several requests that are ready together travel in one message."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import NamedTuple

from crossrail.control.mailbox import Mailbox, NoAnswer
from crossrail.control.wire import Unreachable
from crossrail.kv import messages as m

log = logging.getLogger("crossrail.kv")

# Of a message, so that it fits a packet: a piece of 4096 tokens takes 16 KiB, and a span of a timeline some 60 bytes.
_BYTES_MAX = 40_000
_PIECE_BYTES, _SPAN_BYTES = 256, 100  # overhead of a piece, its name included, and of a span with its name


class _Piece(NamedTuple):
    tokens: m.Tokens
    wanted: asyncio.Future[bool | None]


class Outbox:
    """Threads: the event loop's.

    A model yields a token for each request of a batch at once, and a message for each would cost more than everything
    else done for a token. So pieces wait until the end of the event loop's turn in which the first of them came, and
    for nothing else: neither for other requests nor for answers to earlier messages. A lost or late message delays the
    pieces in it. timeout_s: of a message.
    """

    def __init__(self, mailbox: Mailbox, timeout_s: float) -> None:
        self._mailbox = mailbox
        self._timeout_s = timeout_s
        self._ready: dict[bytes, list[_Piece]] = {}  # by router

    async def offer(self, router: bytes, tokens: m.Tokens) -> bool | None:
        """Whether the router wants this request; None if it did not answer. At most one call at a time per request.

        Raises what Mailbox.ask raises other than NoAnswer and Unreachable.
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
            if not piece.wanted.done():  # otherwise its waiter was cancelled
                piece.wanted.set_result(answer)

    async def _answers(self, router: bytes, pieces: list[m.Tokens]) -> list[bool | None]:
        if len(pieces) == 1:
            return [(await self._mailbox.ask(router, pieces[0], m.Taken, self._timeout_s)).wanted]
        answer = await self._mailbox.ask(router, m.TokensOfSeveral(pieces), m.TakenOfSeveral, self._timeout_s)
        if len(answer.wanted) != len(pieces):
            raise NoAnswer(f"{len(answer.wanted)} answers to the tokens of {len(pieces)} requests")
        return list(answer.wanted)


def _messages(pieces: list[_Piece]) -> Iterator[list[_Piece]]:
    """Packs the pieces, in order, into as few messages as their sizes allow."""
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
