"""Turns tokens into text as they arrive: a token may be half a character, and its text may depend on earlier ones."""

from __future__ import annotations

from collections.abc import Sequence

from crossrail.kv.foreign import exceptions_only
from crossrail.kv.model import Tokenizer

_HALF = "�"  # what decoders show for bytes that are not a whole character
_CHARACTER_TOKENS = 4  # of one character at most: one for each of its bytes
_WAITING_MAX = 8


class TextStream:
    """The text of one answer, piece by piece. All pieces together are the text of all of its tokens.

    stops: texts that end the answer; neither they nor what follows is part of it. Text that may be the beginning of a
    stop is held back until that is decided. Threads: one at a time.
    """

    def __init__(self, tokenizer: Tokenizer | None, stops: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stops = stops
        self._tokens: list[int] = []
        self._context = 0  # tokens before this index need not be decoded again
        self._told = 0  # the text of tokens before this index has been returned, or is held back
        self._held = ""
        self.stopped = False

    def add(self, tokens: Sequence[int]) -> str:
        """The text that can be shown now; none once the answer has been stopped."""
        if self._tokenizer is None or self.stopped:
            return ""
        self._tokens += tokens
        # Decode with enough earlier tokens that the new text does not depend on where decoding begins.
        known = self._decode(self._context, self._told)
        text = self._decode(self._context)
        if len(text) > len(known) and not text.endswith(_HALF):
            self._context, self._told = self._told, len(self._tokens)
            self._held += text[len(known) :]
        elif len(self._tokens) - self._told > _WAITING_MAX:
            self._settle(known, text)
        begun = self._begun()
        return self._take(len(self._held) - begun)

    def end(self) -> str:
        """The rest: what was held back is no stop after all, and half a character stays one."""
        if self._tokenizer is None or self.stopped:
            return ""
        known = self._decode(self._context, self._told)
        self._held += self._decode(self._context)[len(known) :]
        self._begun()
        return self._take(len(self._held))

    def _settle(self, known: str, text: str) -> None:
        """Commits text that no later token can change, so that a long run without a complete character is not decoded
        over and over: of end tokens that an answer goes on after, which have no text, or of bytes that are not text.
        """
        newest = len(self._tokens) - _CHARACTER_TOKENS
        for end in range(newest, newest - _CHARACTER_TOKENS, -1):  # one of these is not in mid-character
            sure = self._decode(self._context, end)
            if sure == known:
                del self._tokens[self._told : end]
                return
            if len(sure) > len(known) and text.startswith(sure):
                self._held += sure[len(known) :]
                self._context, self._told = self._told, end
                return

    def _decode(self, begin: int, end: int | None = None) -> str:
        assert self._tokenizer is not None
        with exceptions_only():
            return self._tokenizer.decode(self._tokens[begin:end])

    def _begun(self) -> int:
        """Looks for stops in the held text; returns how many of its last characters may be the beginning of one."""
        found = [at for at in (self._held.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self._held = self._held[: min(found)]
            self.stopped = True
            return 0
        return max(
            (n for stop in self._stops for n in range(1, len(stop)) if self._held.endswith(stop[:n])),
            default=0,
        )

    def _take(self, length: int) -> str:
        taken, self._held = self._held[:length], self._held[length:]
        return taken
