"""Waits for a peer's next step that also notice when the peer gave up or died, and always end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from crossrail import Engine, ImmCounter
from crossrail.control.deadlines import in_time, loop_time_s
from crossrail.errors import CrossrailError, WaitTimeout
from crossrail.integrations.verl.errors import VerlUpdateFailed
from crossrail.integrations.verl.pairing import Rank
from crossrail.regions import Region
from crossrail.transfers import Transfer

_LOOK_EVERY_S = 0.5


class Peers:
    """The ranks at the other end. Threads: that of the event loop.

    gave_up: counts those that gave up. timeout_s: how long they may take for one step.
    """

    def __init__(self, engine: Engine, ranks: Sequence[Rank], gave_up: ImmCounter, timeout_s: float) -> None:
        self._engine = engine
        self.ranks = ranks
        self._gave_up = gave_up
        self.timeout_s = timeout_s

    @property
    def names(self) -> str:
        return ", ".join(rank.name for rank in self.ranks)

    @property
    def _not_there(self) -> str:
        """Who does not take what goes to all of them: those that our engine has found silent, if it has."""
        silent = [rank.name for rank in self.ranks if self._engine.peer_state(rank.address) != "connected"]
        return ", ".join(silent) or f"all of {self.names}"

    async def until(self, counter: ImmCounter, count: int, what: str) -> None:
        """Takes so many counts. Raises VerlUpdateFailed."""
        deadline_at_s = loop_time_s() + self.timeout_s
        while True:
            try:
                await counter.wait_async(count, min(_LOOK_EVERY_S, max(0.0, deadline_at_s - loop_time_s())))
                return
            except WaitTimeout:
                self._look()
                if loop_time_s() >= deadline_at_s:
                    raise VerlUpdateFailed(
                        f"{what}: not within {self.timeout_s:g} s (timeout_s), from {self.names}"
                    ) from None

    async def done(self, transfers: Sequence[Transfer], what: str) -> None:
        """Waits until all have succeeded. Raises VerlUpdateFailed, once all have ended except those to a
        frozen peer.
        """
        error = ""
        for transfer in transfers:
            if error:
                transfer.cancel()
            try:
                await in_time(transfer, self.timeout_s)
            except asyncio.TimeoutError:
                transfer.cancel()
                by = self._not_there if transfer.kind == "scatter" else transfer.peer
                error = error or f"{what}: not taken within {self.timeout_s:g} s (timeout_s) by {by}"
            except CrossrailError as failure:
                error = error or f"{what}: {failure}"
        if error:
            self._look()
            raise VerlUpdateFailed(error)

    def tell(self, region: Region, *, immediates: Sequence[int]) -> Transfer:
        """Counts one of each rank's immediate, and moves nothing. region: any of ours."""
        there = [rank.tables_there for rank in self.ranks]
        return self._engine.submit_scatter(region, there, lengths=0, src_offsets=0, dst_offsets=0, imm=list(immediates))

    def give_up(self, region: Region) -> None:
        """Tells them, as far as they can still be reached."""
        for rank in self.ranks:
            try:
                self._engine.submit_write(region, rank.tables_there, 0, imm=rank.gave_up)
            except CrossrailError:
                continue  # it is gone, or we are: then it is noticed by that

    def _look(self) -> None:
        if self._gave_up.poll():
            raise VerlUpdateFailed(f"a rank at the other end gave up, of {self.names}: its log says why")
        for rank in self.ranks:
            if self._engine.peer_state(rank.address) == "lost":
                raise VerlUpdateFailed(f"{rank.name} died, or cannot be reached any more")
