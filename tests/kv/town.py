"""A cluster of services on the simulator, with nodes that die, freeze and join while requests run.

Every request ends once: with the tokens of one node alone, or with words that say why. No page stays in use, and none
is written to while nobody has it.

    ./dev run crossrail sim --scenario tests.kv.town:thousand --seed 1
"""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

import crossrail as xr
from crossrail import sim
from crossrail.kv import messages as m
from crossrail.kv.nodes.decoder import Decoder
from crossrail.kv.nodes.node import Node
from crossrail.kv.nodes.prefiller import Prefiller
from crossrail.sim.scenarios import Run
from tests.support.kv_cluster import LAYOUT, NODE, ROUTER, Cluster, monolithic, prompt_of
from tests.support.kv_guard import PageGuard

GREEDY = m.Sampling(max_tokens=6, ignore_end=True)
# Of ends that name nodes as what failed; "unavailable" and "overloaded" say so themselves.
REASONS = ("its decoder is gone", "prefillers that were tried", "no node took the request")
FAILURES: tuple[m.EndReason, ...] = ("error", "unavailable", "overloaded")
QUIET_S = 60.0  # virtual: for what is left when all requests have ended


@dataclass(frozen=True)
class Plan:
    """requests begin within begin_s. Trouble comes after a time drawn from every_s, so many times at most, until all
    requests have ended. kill_or_add() is to be troubles_min of them, or the town was too quiet to show much.
    """

    prefillers: int = 4
    decoders: int = 6
    requests: int = 40
    begin_s: float = 3.0
    every_s: tuple[float, float] = (0.2, 0.8)
    troubles_min: int = 0
    troubles_max: int = 5
    tokens_min: int = 2
    tokens_max: int = 220
    pages: int = LAYOUT.pages
    token_s: float = 0.0005  # that a layer takes for each token


class Town:
    """A cluster in a world; what happens is drawn from the seed."""

    def __init__(self, world: sim.World, plan: Plan) -> None:
        self.world = world
        self.plan = plan
        self.draw = random.Random(world.seed)
        self.cluster = Cluster(
            transport="sim",
            layout=replace(LAYOUT, pages=plan.pages),
            node_options=replace(NODE, page_wait_s=20.0),
            router_options=replace(
                ROUTER, lease_s=2.0, queue_s=20.0, requests_max=plan.requests, request_timeout_s=300.0
            ),
        )
        self.ends: Counter[str] = Counter()
        self.troubles: Counter[str] = Counter()
        self.in_flight_max = 0
        self.guards: dict[str, PageGuard] = {}
        self._added = 0

    async def run(self, trouble: Callable[["Town"], Awaitable[None]]) -> None:
        """Until every request has ended, and then until no page is in use."""
        self.cluster.add_router()
        for _ in range(self.plan.prefillers):
            self.add(Prefiller)
        for _ in range(self.plan.decoders):
            self.add(Decoder)
        await self.cluster.joined()
        troubling = asyncio.ensure_future(self._trouble(trouble))
        await asyncio.gather(*(self._request(index) for index in range(self.plan.requests)))
        troubling.cancel()
        await asyncio.wait([troubling])
        if not troubling.cancelled():
            troubling.result()
        deadline_at_s = self.world.now_s + QUIET_S
        while self.cluster.busy_pages() and self.world.now_s < deadline_at_s:
            await asyncio.sleep(0.1)

    def problems(self) -> list[str]:
        """Sentences about what is wrong in the end; empty: nothing."""
        found = [f"pages of {name} are in use: {report}" for name, report in self.cluster.busy_pages().items()]
        found += [sentence for guard in self.guards.values() for sentence in guard.check()]
        assert self.cluster.router is not None
        counted = {address: tokens for address, tokens in self.cluster.router._placement._sent.items() if tokens}
        if counted:
            found.append(f"the router counts tokens under way when there are none: {counted}")
        if self.ends.total() != self.plan.requests:
            found.append(f"{self.ends.total()} ends of {self.plan.requests} requests")
        if self.troubles.total() < self.plan.troubles_min:
            found.append(f"{self.troubles.total()} nodes died or joined, of {self.plan.troubles_min}")
        return found + [f"{count} requests ended {how}" for how, count in self.ends.items() if how.startswith("wrong")]

    def add(self, kind: type[Node]) -> None:
        self._added += 1
        name = f"{kind.role}-{self._added}"
        node = self.cluster.add(kind, name, self.plan.token_s)
        if isinstance(node, Decoder):
            self.guards[name] = PageGuard(node)

    def any_node(self, kind: type[Node] = Node) -> str:
        return self.draw.choice(sorted(name for name, node in self.cluster.nodes.items() if isinstance(node, kind)))

    async def kill(self, name: str) -> Node:
        node = self.cluster.nodes.pop(name)
        self.guards.pop(name, None)
        self.world.kill(self.cluster.engines[name])
        await node.mailbox.close()
        return node

    async def _trouble(self, trouble: Callable[["Town"], Awaitable[None]]) -> None:
        for _ in range(self.plan.troubles_max):
            await asyncio.sleep(self.draw.uniform(*self.plan.every_s))
            await trouble(self)

    async def _request(self, index: int) -> None:
        await asyncio.sleep(self.draw.uniform(0, self.plan.begin_s))
        prompt = prompt_of(self.draw.randrange(self.plan.tokens_min, self.plan.tokens_max), seed=index)
        assert self.cluster.router is not None
        try:
            # One more is under way once it has been admitted, which it is before the first wait.
            asking = asyncio.ensure_future(self.cluster.complete(prompt, GREEDY))
            await asyncio.sleep(0)
            self.in_flight_max = max(self.in_flight_max, self.cluster.router.requests)
            tokens, end = await asking
        except xr.CrossrailError as error:
            end, tokens = m.End("error", str(error)), []
        if end.reason in FAILURES:
            is_told = end.reason != "error" or any(reason in end.detail for reason in REASONS)
            self.ends["failed" if is_told else f"wrong: {end.detail}"] += 1
        else:
            is_right = (end.reason, tokens) == ("length", await monolithic(prompt, GREEDY))
            self.ends["right" if is_right else "wrong: other tokens"] += 1


# --- what goes wrong ---


async def kill_and_replace(town: Town) -> None:
    town.add(type(await town.kill(town.any_node())))


async def freeze(town: Town) -> None:
    """For longer than a lease, and than decoders wait for prefillers."""
    town.world.freeze(town.cluster.engines[town.any_node()], for_s=town.draw.uniform(0.1, 10.0))


async def freeze_busy_prefiller(town: Town) -> None:
    """In the middle of a prompt, for longer than decoders wait: its writes come when their pages serve others."""
    while not (busy := [n for n in town.cluster.nodes.values() if isinstance(n, Prefiller) and n.load().requests]):
        await asyncio.sleep(0.01)
    town.world.freeze(town.cluster.engines[town.draw.choice(busy).name], for_s=town.draw.uniform(4.0, 6.0))


async def kill_or_freeze(town: Town) -> None:
    await town.draw.choice([kill_and_replace, freeze])(town)


async def kill_or_add(town: Town) -> None:
    """The last one of its kind is not killed."""
    kind = town.draw.choice([Prefiller, Decoder])
    is_last = sum(isinstance(node, kind) for node in town.cluster.nodes.values()) == 1
    if town.draw.random() < 0.5 and not is_last:
        town.troubles[f"{kind.role} killed"] += 1
        await town.kill(town.any_node(kind))
    else:
        town.troubles[f"{kind.role} added"] += 1
        town.add(kind)


# --- the cluster of the issue ---

# Its models are slow: the last requests end after some 40 virtual seconds.
THOUSAND = Plan(
    64,
    192,
    1000,
    begin_s=0.0,
    every_s=(1.0, 1.0),
    troubles_min=30,
    troubles_max=1000,
    tokens_max=120,
    pages=160,
    token_s=0.01,
)


async def thousand(run: Run) -> None:
    """1,000 requests in flight over 64 prefillers and 192 decoders; a node dies or joins every virtual second."""
    await play(run, THOUSAND)


async def play(run: Run, plan: Plan) -> None:
    town = Town(run.world, plan)
    await town.run(kill_or_add)
    assert town.cluster.router is not None
    run.check.equal("problems", town.problems(), [])
    run.check.equal("requests in flight", town.in_flight_max, plan.requests)
    counts = town.cluster.router.counts
    told = town.ends | town.troubles | {how: counts[how] for how in ("redispatched", "restarted")}
    for what, count in sorted(told.items()):
        run.figure(what, count, "")
    await town.cluster.close()
