"""`crossrail error`: prints what the documentation says about an error, for those who have only its message."""

from __future__ import annotations

import itertools
import re
import shutil
import textwrap

import click

from crossrail.errors import UsageError, error_texts

_WIDTH_MAX = 120
_CODE_WIDTH = 22
_WORD = re.compile(r"[A-Za-z][\w-]+")


def _codes(_context: click.Context, _parameter: click.Parameter, begun: str) -> list[str]:
    return [code for code in error_texts() if code.startswith(begun)]


@click.command("error")
@click.argument("words", metavar="[CODE]", nargs=-1, shell_complete=_codes)
def command(words: tuple[str, ...]) -> None:
    """Explain CODE and what to do about it: peer-lost, or the name of the class, PeerLost, or an event of the log,
    as peer-frozen. Without CODE, list all codes.

    A line of a log or a traceback does as well, for the code that is named in it; other words list the codes that they
    belong to.
    """
    texts = error_texts()
    width = min(shutil.get_terminal_size().columns, _WIDTH_MAX)
    if not words:
        _list(texts, width)
        return
    asked = " ".join(words)
    named = _named(asked, texts)
    if named is not None:
        click.echo(f"{named}\n{_wrapped(texts[named], width)}")
        return
    found = {code: text for code, text in texts.items() if all(word.lower() in text.lower() for word in asked.split())}
    if not found:
        raise UsageError(f"{asked!r} is no error code; `crossrail error` lists those there are")
    _list(found, width)


def _named(asked: str, texts: dict[str, str]) -> str | None:
    """The code that was asked for, or the first one that occurs in the text as a word of its own."""
    codes = {_simple(name): code for code, text in texts.items() for name in (code, text[1:].partition("`")[0])}
    if code := codes.get(_simple(asked)):
        return code
    return next((codes[word] for word in map(_simple, _WORD.findall(asked)) if word in codes), None)


def _simple(name: str) -> str:
    return re.sub(r"[-_ ]", "", name.lower())


def _list(texts: dict[str, str], width: int) -> None:
    """A line for each: its code, and as much of what it means as fits. At once: who reads the first only harms none."""
    lines = []
    for code, text in texts.items():
        head = f"{code:{_CODE_WIDTH}}  "  # longer codes take room from their texts
        lines.append(head + textwrap.shorten(_meaning(text), max(width - len(head), 12), placeholder=" ..."))
    click.echo("\n".join(lines))


def _meaning(text: str) -> str:
    """The first sentence, without the name of the class, or "An event": the reader sees the code already."""
    sentence = text.partition("\n")[0].partition(". ")[0].removesuffix(".")
    head, colon, rest = sentence.partition(": ")
    return rest if colon else head


def _wrapped(text: str, width: int) -> str:
    """Paragraphs and items of lists, as wide as the terminal. No word is cut: commands are to be copied."""
    lines = text.splitlines()
    joined = [lines[0]]
    for before, line in itertools.pairwise(lines):
        if line and before and not line.startswith("- "):
            joined[-1] += " " + line
        else:
            joined.append(line)
    return "\n".join(
        textwrap.fill(
            line,
            width,
            subsequent_indent="  " if line.startswith("- ") else "",
            break_long_words=False,
            break_on_hyphens=False,
        )
        for line in joined
    )
