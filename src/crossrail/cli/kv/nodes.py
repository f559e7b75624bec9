"""`crossrail kv prefiller` and `crossrail kv decoder`."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path
from typing import Any

import click

import crossrail as xr
from crossrail.cli.kv.common import (
    end_wanted,
    engine_options,
    open_model,
    parse_options,
    read_secret,
    service_options,
    together,
)
from crossrail.kv.decoder import Decoder
from crossrail.kv.mailbox import Mailbox
from crossrail.kv.memory import RankMemory
from crossrail.kv.node import Node, NodeOptions
from crossrail.kv.prefiller import Prefiller
from crossrail.kv.rendezvous import find_by_http
from crossrail.kv.wire import EngineWire

_DEFAULTS = NodeOptions()

_node_options = together(
    click.option("--router", "routers", multiple=True, required=True, metavar="URL", help="Several times for several."),
    click.option("--name", help="Unique among all nodes; by default made of role, host and process."),
    click.option(
        "--model",
        default="toy",
        show_default=True,
        help="'toy', 'qwen3', 'llama', 'deepseek', a checkpoint's directory, or package.module:function.",
    ),
    click.option("--model-option", "model_options", multiple=True, metavar="KEY=VALUE", help="For the model."),
    click.option("--drain-s", default=30.0, show_default=True, help="For what is under way, when told to end."),
    click.option("--probe-s", default=_DEFAULTS.probe_s, show_default=True, help="How often peers are asked."),
    click.option("--silent-s", default=_DEFAULTS.silent_s, show_default=True, help="Then they are given up."),
    service_options,
)


@click.command()
@click.option("--chunk-tokens", default=_DEFAULTS.chunk_tokens, show_default=True, help="Of one step of the model.")
@click.option("--queue-max", default=_DEFAULTS.queue_max, show_default=True, help="Requests that wait here at most.")
@_node_options
def prefiller(chunk_tokens: int, queue_max: int, **options: Any) -> None:
    """Run prompts through the model and write their KV to decoders. Ends on SIGTERM, after what is under way."""
    _run(Prefiller, options, chunk_tokens=chunk_tokens, queue_max=queue_max)


@click.command()
@click.option("--requests-max", default=_DEFAULTS.requests_max, show_default=True, help="Served side by side.")
@_node_options
def decoder(requests_max: int, **options: Any) -> None:
    """Have prompts' KV sent here and generate tokens. Ends on SIGTERM, after what is under way."""
    _run(Decoder, options, requests_max=requests_max)


def _run(kind: type[Node], options: dict[str, Any], **node_options: Any) -> None:
    asyncio.run(_serve(kind, options, NodeOptions(**node_options, **{k: options[k] for k in ("probe_s", "silent_s")})))


async def _serve(kind: type[Node], options: dict[str, Any], node_options: NodeOptions) -> None:
    ended = end_wanted(options["until_stdin_closes"])
    secret_file: Path | None = options["secret_file"]
    secret = read_secret(secret_file)
    name = options["name"] or f"{kind.role}-{socket.gethostname()}-{os.getpid()}"
    model = open_model(options["model"], parse_options(options["model_options"]))
    of_engine = engine_options(options["transport"], options["rails"], options["port"], secret)
    with xr.Engine(name, **of_engine) as engine:
        wire = EngineWire(engine)
        ranks = {rank: RankMemory.alloc(engine, model.layout) for rank in range(model.layout.tp)}
        finders = [find_by_http(url, secret) for url in options["routers"]]
        node = kind(name, Mailbox(wire, secret), model, ranks, finders, node_options)
        node.start()
        try:
            click.echo(f"{kind.role} {name}: {model.name}, {model.layout.describe()}")
            await _until_ended_or_refused(node, ended)
            click.echo(f"{kind.role} {name}: ending, after what is under way")
            if not await node.drain(options["drain_s"]):
                click.echo(f"{kind.role} {name}: not all was finished within {options['drain_s']:g} s", err=True)
        finally:
            await node.close()
            wire.close()


async def _until_ended_or_refused(node: Node, ended: asyncio.Event) -> None:
    """Raises Refused as soon as one router does not take the node."""
    end = asyncio.ensure_future(ended.wait())
    refusals = [link.refused for link in node.links]
    both: list[asyncio.Future[Any]] = [end, *refusals]
    await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    end.cancel()
    for refusal in refusals:
        if refusal.done():
            refusal.result()
