"""`crossrail explain NAME`: how an engine of ours would reach a running `crossrail serve`."""

from __future__ import annotations

import click

import crossrail as xr
from crossrail.cli.rendezvous import resolve


@click.command("explain")
@click.argument("name")
@click.option("--rails", type=click.IntRange(1, 16), default=1, show_default=True, help="Rails to open.")
def command(name: str, rails: int) -> None:
    """Show how bytes would reach the `crossrail serve` of that NAME, and why that way."""
    address, _ = resolve(name)
    with xr.Engine(rails=rails) as engine:
        engine.connect(address)
        click.echo(str(engine.explain(address)))
