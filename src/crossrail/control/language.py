"""The set of messages that the nodes of a service exchange, and how they are encoded."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from crossrail.errors import UsageError


class Letter(Protocol):
    """A message, and which question it is (ask) or answers (answers); 0: none."""

    @property
    def body(self) -> object: ...

    @property
    def ask(self) -> int: ...

    @property
    def answers(self) -> int: ...


class Language:
    """The messages of one service, among them Failed, as MessagePack. purpose: of seal.Sealer.

    letter: a msgspec Struct of body, ask and answers. The type of its body says which messages there are.
    """

    def __init__(self, purpose: bytes, letter: type[msgspec.Struct]) -> None:
        self.purpose = purpose
        self._letter = letter
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(letter)

    def encode(self, body: Any, ask: int, answers: int) -> bytes:
        """The message as bytes. UsageError for a field out of bounds, which the other side would drop silently."""
        data = msgspec.msgpack.encode(self._letter(body, ask, answers))
        try:
            self._decoder.decode(data)
        except msgspec.MsgspecError as error:
            raise UsageError(f"{type(body).__name__} cannot be sent: {error}") from None
        return data

    def decode(self, data: bytes) -> Letter:
        """The inverse of encode. UsageError for anything malformed."""
        try:
            letter: Letter = self._decoder.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise UsageError(f"not a valid message: {error}") from None
        return letter
