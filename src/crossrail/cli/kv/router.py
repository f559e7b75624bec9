"""`crossrail kv router`."""

from __future__ import annotations

from typing import Any

from crossrail.cli import event_loop
from crossrail.cli.kv.common import (
    chosen,
    drained,
    ends_when_told,
    open_tokenizer,
    opened,
    tell,
    until_ended_or_refused,
)
from crossrail.cli.places import parse_place
from crossrail.cli.service import name_of_host
from crossrail.errors import CrossrailError, UsageError
from crossrail.kv.etcd.membership import EtcdRoster
from crossrail.kv.etcd.records import Place
from crossrail.kv.http.front import Front
from crossrail.kv.messages import check_name
from crossrail.kv.model import Tokenizer
from crossrail.kv.router.router import Router, RouterOptions

_DEFAULTS = RouterOptions()


def router(listen: str, tokenizer: str, **options: Any) -> None:
    """The command; commands.py has its options and its help."""
    try:
        host, port = parse_place(listen, port_min=0, needs_host=False)
    except UsageError as error:
        raise UsageError(f"--listen {error}") from None
    check_name(options["name"], "--name")
    with ends_when_told():
        its_tokenizer = open_tokenizer(tokenizer)
    event_loop.run(_serve(host, port, its_tokenizer, options))


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
