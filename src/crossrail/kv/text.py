"""From tokens to text while they come: a token may be half a character, and its text may depend on those before it."""

from __future__ import annotations

from collections.abc import Sequence

from crossrail.kv.model import Tokenizer

_HALF = "�"  # what decoders make of bytes that are no whole character


class TextStream:
    """The text of one answer, piece by piece. The pieces together are the text of all of its tokens.

    stops: texts that end the answer; neither they nor what follows is part of it. Text that may be the beginning of one
    is held back until that is known. Threads: one at a time.
    """

    def __init__(self, tokenizer: Tokenizer | None, stops: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stops = stops
        self._tokens: list[int] = []
        self._context = 0  # tokens before here need not be looked at again
        self._told = 0  # and the text of those before here is out, or held back
        self._held = ""
        self.stopped = False

    def add(self, tokens: Sequence[int]) -> str:
        """What can be shown now; nothing more once it is stopped."""
        if self._tokenizer is None or self.stopped:
            return ""
        self._tokens += tokens
        # As much before the new ones as makes the new text independent of where decoding begins.
        known = self._tokenizer.decode(self._tokens[self._context : self._told])
        text = self._tokenizer.decode(self._tokens[self._context :])
        if len(text) > len(known) and not text.endswith(_HALF):
            self._context, self._told = self._told, len(self._tokens)
            self._held += text[len(known) :]
        begun = self._begun()
        return self._take(len(self._held) - begun)

    def end(self) -> str:
        """The rest: what was held back is no stop, and half a character stays one."""
        if self._tokenizer is None or self.stopped:
            return ""
        known = self._tokenizer.decode(self._tokens[self._context : self._told])
        self._held += self._tokenizer.decode(self._tokens[self._context :])[len(known) :]
        self._begun()
        return self._take(len(self._held))

    def _begun(self) -> int:
        """Looks for stops in what is held; returns how many of its last characters may be the beginning of one."""
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
