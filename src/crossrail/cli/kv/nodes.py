"""`crossrail kv prefiller` and `crossrail kv decoder`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from typing import Any

from crossrail.cli import event_loop
from crossrail.cli.kv.common import (
    EndWanted,
    chosen,
    complain,
    drained,
    ends_when_told,
    open_model,
    opened,
    parse_options,
    tell,
    until_ended_or_refused,
)
from crossrail.cli.memory import check_memory
from crossrail.errors import UsageError
from crossrail.kv.etcd.membership import EtcdPresence
from crossrail.kv.etcd.records import Place
from crossrail.kv.http.rendezvous import check_url, find_by_http
from crossrail.kv.messages import check_name
from crossrail.kv.nodes.decoder import Decoder
from crossrail.kv.nodes.node import Node, NodeOptions
from crossrail.kv.nodes.prefiller import Prefiller
from crossrail.kv.transfer.layout import KvLayout
from crossrail.kv.transfer.memory import RankMemory
from crossrail.kv.transfer.pages import POOL_PAGE_BYTES
from crossrail.observe import serve_metrics

_DEFAULTS = NodeOptions()
# Time to close: a frozen peer takes twice prefiller_timeout_s, which is 8 s; a hung model reacts to its cancellation at
# once, or never.
_CLOSE_S, _CLOSE_HUNG_S = 10.0, 1.0


def prefiller(**options: Any) -> None:
    """The command; commands.py has its options and its help."""
    event_loop.run(_serve(Prefiller, options))


def decoder(**options: Any) -> None:
    """The command; commands.py has its options and its help."""
    event_loop.run(_serve(Decoder, options))


async def _serve(kind: type[Node], options: dict[str, Any]) -> None:
    name = options["name"] or f"{kind.role}-{socket.gethostname()}-{os.getpid()}"
    check_name(name, "--name")
    url = options["membership"]
    if bool(url) == bool(options["routers"]):
        raise UsageError("a node finds its routers by --router, or by --membership etcd://...: give one of the two")
    for router in options["routers"]:
        check_url(router)
    place = Place.from_url(url) if url else None
    with ends_when_told():
        model = open_model(options["model"], parse_options(options["model_options"]))
    _check_room(f"{kind.role} {name}", model.layout)
    async with opened(name, options) as service, contextlib.AsyncExitStack() as stack:
        ranks = {rank: RankMemory.alloc(service.engine, model.layout) for rank in range(model.layout.tp)}
        finders = [find_by_http(url, service.secret) for url in options["routers"]]
        node = kind(name, service.mailbox, model, ranks, finders, chosen(_DEFAULTS, options))
        presence = EtcdPresence(node, place, service.secret) if place is not None else None
        node.start()
        if presence is not None:
            presence.start()
        try:
            tell(f"{kind.role} {name}: {model.name}, {model.layout.describe()}")
            if (port := options["metrics_port"]) is not None:
                metrics = serve_metrics(service.engine, port=port, host=options["metrics_host"])
                tell(f"{kind.role} {name}: metrics at {stack.enter_context(metrics).url}")
            await until_ended_or_refused(service.end, node.refused)
            if service.end.is_deserted:
                await node.drain(0.0)  # nobody waits for what is under way, nor reads what we say
            else:
                await drained(f"{kind.role} {name}", node.drain, options["drain_s"], service.end)
        finally:
            try:
                await _closed(f"{kind.role} {name}", node, service.end)
            finally:
                if presence is not None:
                    await presence.close()


def _check_room(who: str, layout: KvLayout) -> None:
    """UsageError when this machine has too little memory for its pages, which take it as they fill: a node that starts
    all the same is killed some time later.
    """
    needed_bytes = layout.tp * layout.rank_bytes + layout.pages * POOL_PAGE_BYTES
    check_memory(f"{who}, with {layout.pages} pages of KV,", needed_bytes, "use fewer: --model-option pages=N")


async def _closed(who: str, node: Node, end: EndWanted) -> None:
    """Closes it, which waits until nothing touches its memory any more; but the process ends without that after some
    seconds, and at once at a second signal: a model that hangs may keep its pages for ever.
    """
    closing, hurrying = asyncio.ensure_future(node.close()), asyncio.ensure_future(end.at_once.wait())
    is_hurried = end.at_once.is_set() or end.is_deserted
    close_s = _CLOSE_S if is_hurried else max(_CLOSE_S, 2 * node.options.prefiller_timeout_s + _CLOSE_HUNG_S)
    close_s = _CLOSE_HUNG_S if node.load().hangs else close_s
    await asyncio.wait(
        [closing] if is_hurried else [closing, hurrying], timeout=close_s, return_when=asyncio.FIRST_COMPLETED
    )
    hurrying.cancel()
    if not closing.done():
        ended = "when told to" if end.at_once.is_set() or end.is_deserted else f"after {close_s:g} s more"
        why = "its model hangs" if node.load().hangs else "its model or a peer has not let go of its memory"
        if (error := sys.exc_info()[1]) is not None:  # why it ends: nothing else reports it any more
            complain(f"{who}: {error}")
        complain(f"{who}: ended {ended}, before it was closed: {why}")
        os._exit(1)
    closing.result()
