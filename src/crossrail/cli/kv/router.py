"""`crossrail kv router`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import click

import crossrail as xr
from crossrail.cli.kv.common import end_wanted, engine_options, open_tokenizer, read_secret, service_options
from crossrail.errors import UsageError
from crossrail.kv.http import Front
from crossrail.kv.mailbox import Mailbox
from crossrail.kv.model import Tokenizer
from crossrail.kv.router import Router, RouterOptions
from crossrail.kv.wire import EngineWire

_DEFAULTS = RouterOptions()


@click.command()
@click.option(
    "--listen", default="127.0.0.1:8000", show_default=True, metavar="HOST:PORT", help="Where HTTP is served."
)
@click.option("--name", default="router", show_default=True)
@click.option(
    "--tokenizer",
    default="toy",
    show_default=True,
    help="'toy' (bytes), a checkpoint's directory, package.module:function, or 'none': then prompts are token ids.",
)
@click.option("--requests-max", default=_DEFAULTS.requests_max, show_default=True, help="More are answered with 429.")
@click.option("--heartbeat-s", default=_DEFAULTS.heartbeat_s, show_default=True, help="How often nodes report.")
@click.option(
    "--lease-s", default=_DEFAULTS.lease_s, show_default=True, help="A node not heard of for so long is gone."
)
@click.option("--queue-s", default=_DEFAULTS.queue_s, show_default=True, help="How long a request waits for room.")
@click.option("--request-s", default=_DEFAULTS.request_s, show_default=True, help="How long one may take in all.")
@service_options
def router(listen: str, name: str, tokenizer: str, secret_file: Path | None, **options: Any) -> None:
    """Serve OpenAI's /v1/completions. Nodes find this router by its URL and the secret."""
    host, colon, port = listen.rpartition(":")
    if not colon or not port.isdigit():
        raise UsageError(f"--listen {listen!r} must be HOST:PORT")
    secret = read_secret(secret_file)
    asyncio.run(_serve(host.strip("[]"), int(port), name, open_tokenizer(tokenizer), secret, options))


async def _serve(
    host: str, port: int, name: str, tokenizer: Tokenizer | None, secret: bytes, options: dict[str, Any]
) -> None:
    ended = end_wanted(options["until_stdin_closes"])
    chosen = {key: options[key] for key in ("requests_max", "heartbeat_s", "lease_s", "queue_s", "request_s")}
    of_engine = engine_options(options["transport"], options["rails"], options["port"], secret)
    with xr.Engine(name, **of_engine) as engine:
        wire = EngineWire(engine)
        serving = Router(name, Mailbox(wire, secret), RouterOptions(**chosen))
        front = Front(serving, tokenizer, secret)
        serving.start()
        try:
            port = await front.start(host, port)
            click.echo(f"router {name} serves http://{host}:{port}")
            await ended.wait()
        finally:
            await front.close()
            await serving.close()
            wire.close()
