"""A router, prefillers and decoders of the toy model in this process, each on an engine of its own."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace

import numpy as np

import crossrail as xr
from crossrail.control.mailbox import Mailbox
from crossrail.control.wire import EngineWire, Wire
from crossrail.kv import messages as m
from crossrail.kv.etcd.membership import EtcdPresence, EtcdRoster
from crossrail.kv.etcd.records import Place
from crossrail.kv.model import Model, Tokens, generate
from crossrail.kv.nodes.node import Node, NodeOptions
from crossrail.kv.nodes.router_link import FindRouter
from crossrail.kv.router.requests import Chunk
from crossrail.kv.router.router import Router, RouterOptions
from crossrail.kv.toy import ToyModel
from crossrail.kv.transfer.layout import KvLayout
from crossrail.kv.transfer.memory import RankMemory
from crossrail.kv.transfer.pages import PageState
from tests.support.kv_net import BadWire

SECRET = b"of these tests"
LAYOUT = KvLayout(layers=4, pages=64, page_tokens=8, kv_heads=4, head_dim=8, dtype="float16")
# Short enough that a test sees deaths, long enough that a busy machine makes none up.
NODE = NodeOptions(retry_s=0.05, chunk_tokens=32, probe_s=0.3, prefiller_timeout_s=1.5, answer_timeout_s=1.5)
ROUTER = RouterOptions(
    heartbeat_s=0.2, lease_s=6.0, queue_s=5.0, request_timeout_s=40.0, answer_timeout_s=1.5, sweep_s=0.05
)


@dataclass
class Cluster:
    """Everything is closed by close()."""

    transport: str = "shm"
    layout: KvLayout = LAYOUT
    node_options: NodeOptions = NODE
    router_options: RouterOptions = ROUTER
    router: Router | None = None
    nodes: dict[str, Node] = field(default_factory=dict)
    models: dict[str, ToyModel] = field(default_factory=dict)
    engines: dict[str, xr.Engine] = field(default_factory=dict)
    wires: dict[str, EngineWire] = field(default_factory=dict)
    also: list[FindRouter] = field(default_factory=list)  # more routers of the nodes
    place: Place | None = None  # in etcd; None: membership lives in the router
    presences: dict[str, EtcdPresence] = field(default_factory=dict)
    spoil: Callable[[Wire], BadWire] | None = None  # what control messages go through
    spoilt: dict[str, BadWire] = field(default_factory=dict)

    def mailbox(self, name: str, secret: bytes = SECRET) -> Mailbox:
        self.engines[name] = xr.Engine(name, transport=self.transport)
        self.wires[name] = EngineWire(self.engines[name])
        wire: Wire = self.wires[name]
        if self.spoil is not None:
            wire = self.spoilt[name] = self.spoil(wire)
        return m.mailbox(wire, secret, resend_s=0.2)

    def add_router(self, name: str = "router") -> Router:
        options, place = self.router_options, self.place
        membership = EtcdRoster(options.lease_s, place, SECRET, options.heartbeat_s) if place is not None else None
        self.router = Router(name, self.mailbox(name), self.router_options, membership)
        self.router.start()
        return self.router

    async def where(self) -> bytes:
        if self.router is None:
            raise xr.CrossrailError("the router is not there")
        return self.router.mailbox.address

    def add(self, kind: type[Node], name: str, token_s: float = 0.0, secret: bytes = SECRET, **changes: object) -> Node:
        model = self.models[name] = ToyModel(replace(self.layout, **changes), token_s=token_s)
        return self.host(kind, name, model, secret)

    def host(self, kind: type[Node], name: str, model: Model, secret: bytes = SECRET) -> Node:
        """Like add(), with any model."""
        mailbox = self.mailbox(name, secret)
        ranks = {rank: RankMemory.alloc(self.engines[name], model.layout) for rank in range(model.layout.tp)}
        finders = [self.where, *self.also] if self.place is None else []
        node = self.nodes[name] = kind(name, mailbox, model, ranks, finders, self.node_options)
        node.start()
        if self.place is not None:
            self.presences[name] = EtcdPresence(node, self.place, secret)
            self.presences[name].start()
        return node

    async def joined(self) -> None:
        """Every node by its first router."""
        for node in self.nodes.values():
            while not node.links:
                await asyncio.sleep(0.01)
            await node.links[0].joined.wait()

    async def complete(self, prompt: Tokens, sampling: m.Sampling, **options: object) -> tuple[list[int], m.End]:
        """All tokens, and the end."""
        assert self.router is not None
        tokens: list[int] = []
        chunks: AsyncIterator[Chunk] = self.router.complete(prompt, sampling, **options)
        async for chunk in chunks:
            tokens += chunk.tokens
            if chunk.end is not None:
                return tokens, chunk.end
        raise AssertionError("no end came")

    async def kill(self, name: str) -> None:
        """Its engine ends at once; its remaining Python objects are cleaned up."""
        self.engines[name].close(0.0)
        node = self.nodes.pop(name)
        await node.mailbox.close()
        if name in self.presences:
            presence = self.presences.pop(name)
            presence.registration.lease = None  # its record stays until its lease ends
            await presence.close()

    async def close_router(self) -> None:
        router, self.router = self.router, None
        assert router is not None
        await router.close()
        self.wires.pop(router.name).close()
        self.engines.pop(router.name).close()

    async def close(self) -> None:
        for name, node in self.nodes.items():
            await node.close()
            if name in self.presences:
                await self.presences[name].close()
        if self.router is not None:
            await self.router.close()
        for bad in self.spoilt.values():
            await bad.close()
        for wire in self.wires.values():
            with contextlib.suppress(xr.EngineClosed):
                wire.close()
        for engine in self.engines.values():
            engine.close()

    def busy_pages(self) -> dict[str, str]:
        """Pages that are neither free nor cached, by node; empty: nothing leaked."""
        reports = {name: node.pool.report() for name, node in self.nodes.items()}
        return {
            name: str(report)
            for name, report in reports.items()
            if report.leases
            or report.pages[PageState.FREE] + report.pages[PageState.CACHED] != self.nodes[name].pool.pages
        }


async def monolithic(prompt: Tokens, sampling: m.Sampling) -> list[int]:
    """What a single node generates."""
    layout = replace(LAYOUT, pages=256)
    model = ToyModel(layout)
    cache = [[layout.layer_view(np.zeros(layout.layer_bytes, np.uint8)) for _ in range(layout.layers)]]
    return [token async for token in generate(model, cache, prompt, np.arange(256), sampling)]


def prompt_of(count: int, seed: int = 1) -> Tokens:
    return np.random.default_rng(seed).integers(0, 256, count).astype(np.int32)


def node_record(name: str, role: m.Role = "decoder", address: bytes = b"", layout: KvLayout = LAYOUT) -> m.NodeRecord:
    return m.NodeRecord(name, address or name.encode(), layout.to_wire(), role=role, model="model")
