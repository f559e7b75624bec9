"""`crossrail kv router`."""

from __future__ import annotations

import asyncio
from typing import Any

import click

from crossrail.cli.kv.common import (
    MEMBERSHIP_HELP,
    chosen,
    drained,
    open_tokenizer,
    opened,
    options_of,
    service_options,
    tell,
    until_ended_or_refused,
)
from crossrail.cli.service import name_of_host
from crossrail.cli.text import seconds
from crossrail.errors import CrossrailError, UsageError
from crossrail.kv.etcd.membership import EtcdRoster
from crossrail.kv.etcd.records import Place
from crossrail.kv.http.front import Front
from crossrail.kv.model import Tokenizer
from crossrail.kv.services.router import Router, RouterOptions

_DEFAULTS = RouterOptions()
_PORT_MAX = 65535


@click.command()
@click.option(
    "--listen", default="127.0.0.1:8000", show_default=True, metavar="HOST:PORT", help="Address of the HTTP server."
)
@click.option("--name", default="router", show_default=True, help="Name of this router in logs and metrics.")
@click.option(
    "--tokenizer",
    default="toy",
    show_default=True,
    help="'toy' (bytes), a checkpoint's directory, package.module:function, or 'none' if prompts are token ids.",
)
@click.option(
    "--membership", default="embedded", show_default=True, metavar="URL", help=f"embedded, or {MEMBERSHIP_HELP}."
)
@options_of(
    _DEFAULTS,
    requests_max="Maximum number of requests in progress; further ones get status 429.",
    tokens_max="Maximum sum of their prompts and max_tokens; further requests get status 429.",
    heartbeat_s="Seconds between reports of a node.",
    lease_s="Seconds without a report after which a node is gone; with etcd twice that, or three reports if longer.",
    queue_s="Seconds that a request may wait for room at a node.",
    request_timeout_s="Seconds that a request may take in total.",
)
@click.option(
    "--drain-s",
    type=seconds(),
    help="Seconds to finish requests in progress after SIGTERM; by default they are cut off.",
)
@service_options
def router(listen: str, tokenizer: str, **options: Any) -> None:
    """Serve OpenAI's /v1/completions. Nodes find this router by its URL and the secret."""
    host, colon, port = listen.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > _PORT_MAX:
        raise UsageError(f"--listen {listen!r} must be HOST:PORT, the port at most {_PORT_MAX}")
    asyncio.run(_serve(host.strip("[]"), int(port), open_tokenizer(tokenizer), options))


async def _serve(host: str, port: int, tokenizer: Tokenizer | None, options: dict[str, Any]) -> None:
    name, settings = options["name"], chosen(_DEFAULTS, options)
    place = Place.from_url(options["membership"]) if options["membership"] != "embedded" else None
    async with opened(name, options) as service:
        beat_s = settings.heartbeat_s
        membership = EtcdRoster(settings.lease_s, place, service.secret, beat_s) if place is not None else None
        serving = Router(name, service.mailbox, settings, membership)
        front = Front(serving, tokenizer, service.secret)
        serving.start()
        try:
            port = await _listening(front, host, port)
            tell(f"router {name} serves http://{name_of_host(host, service.engine)}:{port}")
            await until_ended_or_refused(service.end, serving.refused)
            if (drain_s := options["drain_s"]) is not None and not service.end.is_deserted:
                await drained(f"router {name}", serving.drain, drain_s, service.end)
        finally:
            # In this order: requests are not cancelled because their connections end, and clients hear why they do.
            await serving.close()
            await front.close()


async def _listening(front: Front, host: str, port: int) -> int:
    try:
        return await front.start(host, port)
    except UnicodeError:
        raise UsageError(f"--listen: {host!r} is not the name of a host") from None
    except OSError as error:
        raise CrossrailError(f"--listen {host}:{port}: {error.strerror or error}; choose another") from None
