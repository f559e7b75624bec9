"""`crossrail error`: what the documentation says of an error, for whoever has only the message."""

from __future__ import annotations

import click

from crossrail.errors import UsageError, error_texts


@click.command("error")
@click.argument("code", required=False)
def command(code: str | None) -> None:
    """Explain CODE and what to do about it: peer-lost, or the name of the class, PeerLost. Without CODE, list all
    codes.
    """
    texts = error_texts()
    if code is None:
        click.echo("\n".join(texts))
        return
    asked = _simple(code)
    for name, text in texts.items():
        if asked in (_simple(name), _simple(text[1:].partition("`")[0])):
            click.echo(f"{name}\n{text}")
            return
    raise UsageError(f"{code!r} is no error code; `crossrail error` lists those there are")


def _simple(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")
