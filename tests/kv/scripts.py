"""Decoders that are scripts, on a network in memory: what a router is tested against."""

import asyncio
from dataclasses import dataclass, field, replace

from crossrail.control.mailbox import Mailbox
from crossrail.kv import messages as m
from crossrail.kv.router.membership import Roster
from crossrail.kv.router.router import Router, RouterOptions
from crossrail.kv.transfer.layout import KvLayout
from tests.support.kv_cluster import LAYOUT, node_record, prompt_of
from tests.support.kv_net import Net
from tests.support.limits import SLOWNESS, WAIT_S

OPTIONS = RouterOptions(
    heartbeat_s=0.05 * SLOWNESS,
    lease_s=0.4 * SLOWNESS,
    queue_s=0.3 * SLOWNESS,
    answer_timeout_s=0.2 * SLOWNESS,
    sweep_s=0.02,
)
SHORT = m.Sampling(max_tokens=3)


@dataclass
class Script:
    """A decoder that answers Start as told ("pause": serves only when it may go on), and sends the tokens 1, 2, 3, one
    after each pace_s. "hangs": its model does after hangs_after tokens, before the answer; if is_lost, none comes.
    """

    mailbox: Mailbox
    answer: str = "serve"
    pace_s: float = 0.0
    hangs_after: int = 0
    is_lost: bool = False
    started: list[str] = field(default_factory=list)
    prefillers: list[str] = field(default_factory=list)  # that it was to ask
    cancelled: list[str] = field(default_factory=list)
    unwanted: list[str] = field(default_factory=list)
    paused: asyncio.Event = field(default_factory=asyncio.Event)
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    refused: asyncio.Event = field(default_factory=asyncio.Event)

    async def on_start(self, router: bytes, start: m.Start) -> m.Message:
        self.started.append(start.request)
        if start.prefiller is not None:
            self.prefillers.append(start.prefiller.node)
        if self.answer == "late":
            await asyncio.sleep(3 * OPTIONS.answer_timeout_s)
        if self.answer in ("busy", "never", "duplicate"):
            said, is_busy = f"told to say {self.answer}", self.answer == "busy"
            return m.StartRefused(start.request, said, is_busy, is_duplicate=self.answer == "duplicate")
        if self.answer == "hangs":
            end = m.End("error", "it hangs")
            said = m.pack_tokens(list(range(1, self.hangs_after + 1)))
            message = m.Tokens(start.request, 0, said, end, start.placement, elsewhere=True)
            await self.mailbox.ask(router, message, m.Taken, WAIT_S)
            self.answer = "busy"
            self.refused.set()
            while self.is_lost:
                await asyncio.sleep(WAIT_S)
            return m.Started(start.request)
        self.mailbox.spawn(self.serve(router, start.request, start.placement), "a script")
        return m.Started(start.request)

    def answer_when_told(self) -> tuple[asyncio.Event, asyncio.Event]:
        """Set when it is asked; to be set for its answer."""
        asked, goes_on = asyncio.Event(), asyncio.Event()

        async def start_late(router: bytes, start: m.Start) -> m.Message:
            asked.set()
            await goes_on.wait()
            return await self.on_start(router, start)

        self.mailbox.handle(m.Start, start_late)
        return asked, goes_on

    async def serve(self, router: bytes, request: str, placement: int) -> None:
        if self.answer == "pause":
            self.paused.set()
            await self.go_on.wait()
        for index in range(3):
            await asyncio.sleep(self.pace_s)
            end = m.End("length") if index == 2 else None
            message = m.Tokens(request, index, m.pack_tokens([index + 1]), end, placement)
            taken = await self.mailbox.ask(router, message, m.Taken, WAIT_S)
            if not taken.wanted:
                self.unwanted.append(request)
                self.refused.set()
                return

    async def on_cancel(self, _: bytes, cancel: m.Cancel) -> m.Message:
        self.cancelled.append(cancel.request)
        return m.Taken()


@dataclass
class Town:
    net: Net
    router: Router
    scripts: dict[str, Script] = field(default_factory=dict)

    async def add(
        self, name: str, answer: str = "serve", load: m.Load | None = None, layout: KvLayout = LAYOUT
    ) -> Script:
        mailbox = m.mailbox(self.net.wire(name), b"s3cret", resend_s=0.05)
        script = self.scripts[name] = Script(mailbox, answer)
        mailbox.handle(m.Start, script.on_start)
        mailbox.handle(m.Cancel, script.on_cancel)
        mailbox.start()
        join = m.Join(node_record(name, address=mailbox.address, layout=layout), load or m.Load())
        await mailbox.ask(self.router.mailbox.address, join, m.Joined, WAIT_S)
        return script

    def patient(self) -> None:
        """Scripts send no heartbeats; nobody is missed."""
        assert isinstance(self.router.roster, Roster)
        self.router.roster.lease_s = WAIT_S

    async def complete(self, seed: int = 1, count: int = 1) -> list[int]:
        chunks = self.router.complete(prompt_of(count, seed), SHORT)
        return [token async for chunk in chunks for token in chunk.tokens]

    async def ends(self) -> str:
        """What the end of a request says."""
        details = [chunk.end.detail async for chunk in self.router.complete(prompt_of(1), SHORT) if chunk.end]
        return details[0]


def prefiller_of(town: Town, name: str) -> m.NodeRecord:
    """With pages for all prompts of these tests."""
    return node_record(name, "prefiller", town.net.wire(name).address, replace(LAYOUT, pages=256))
