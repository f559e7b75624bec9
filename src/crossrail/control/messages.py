"""The messages that every service has."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

TEXT_MAX = 2000
Text = Annotated[str, Meta(max_length=TEXT_MAX)]


class Failed(Struct, frozen=True, tag=True):
    """The question was understood and could not be answered: a fault of the one asked."""

    reason: Text


def clipped(text: object) -> str:
    """Words that a Text field holds: short enough, and without what UTF-8 has no bytes for (parts of a file's name)."""
    words = str(text).encode(errors="backslashreplace").decode()
    return words if len(words) <= TEXT_MAX else words[: TEXT_MAX - 3] + "..."
