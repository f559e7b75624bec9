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
    found = [name for name, text in texts.items() if name == code or text.startswith(f"`{code}`")]
    if not found:
        raise UsageError(f"code: {code!r}; `crossrail error` lists those there are")
    click.echo("\n\n".join(f"{name}\n{texts[name]}" for name in found))
