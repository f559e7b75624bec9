"""`crossrail explain NAME`: how an engine of this process would reach a running `crossrail serve`."""

from __future__ import annotations

import click

import crossrail as xr
from crossrail.cli.rendezvous import resolve
from crossrail.cli.service import rails_option, secret_of, tls_options
from crossrail.cli.text import shown_lines


@click.command("explain")
@click.argument("name")
@rails_option
@tls_options
def command(name: str, rails: int | list[str], tls: xr.TlsConfig | None) -> None:
    """Show how bytes would reach the `crossrail serve` called NAME, or the one at tcp://HOST:PORT, and why.

    Engines of your own programs cannot be asked from outside: there, print(engine.explain(peer)).
    """
    secret = secret_of()
    with xr.Engine(rails=rails, tls=tls) as engine:
        address, _ = resolve(name, secret)
        engine.connect(address)
        click.echo(shown_lines(str(engine.explain(address))))
