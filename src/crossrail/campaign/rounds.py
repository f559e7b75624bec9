"""One seed's round of the campaign over processes: mixed operations while processes are killed, frozen and cut off."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from typing import Any

from crossrail.campaign.actions import Actions, NothingDone
from crossrail.campaign.books import Arena, Op, Tally
from crossrail.campaign.checkers import CheckFailed
from crossrail.campaign.players import Players
from crossrail.campaign.process import ProcessGone
from crossrail.campaign.remote import RemoteEngine, RemoteRegion

_STEPS = 30
_STEPS_PER_CHECK = 10
_DRAIN_LIMIT_S = 60.0  # a bound against a hang: peers are given up after 3 s, and machines may be slow
_SETTLE_LIMIT_S = 30.0
_LINGER_S = 0.002  # what is late arrives meanwhile


class Round(Actions[RemoteEngine]):
    """What the players do in one round. It has a ledger of its own: nothing is in progress between rounds."""

    step_s = 0.001

    def __init__(self, players: Players, seed: int) -> None:
        super().__init__(seed)
        self.players = players
        self.engines = players.engines
        self.next_imm = players.next_imm
        self.fleet = players.fleet
        self.rails_down: list[int] = []

    def run(self) -> None:
        """Raises CheckFailed, or whatever else goes wrong: then the players are of no more use."""
        self.players.restock(self.random)
        for engine in self.engines:
            engine.begin_round()
            self._welcome(engine)
        for step in range(_STEPS):
            self.step()
            if self.random.random() < 0.5:
                self.pass_time(10 ** self.random.uniform(-5, -2.3))
            if step % _STEPS_PER_CHECK == 0:
                self.ledger.check()
        self._stop_faults()
        if not self.ends_within(_DRAIN_LIMIT_S):
            left = ", ".join(self._whose(op) for op in self.ledger.pending[:5])
            raise CheckFailed(f"{_DRAIN_LIMIT_S:.0f} s after the last fault there is no end of {left}")
        self._check_restarts()
        self._probe()
        self._settle()
        self.ledger.check_end()
        self._leave()

    def pass_time(self, for_s: float) -> None:
        self.fleet.pass_time(for_s)
        for engine in self.engines:
            engine.settle()
        if self.fleet.complaints:
            raise CheckFailed("; ".join(self.fleet.complaints[:5]))

    # ---- who is there

    def _welcome(self, engine: RemoteEngine) -> None:
        self._add_arenas(engine)
        self._open_pool(engine)

    def _add_arenas(self, engine: RemoteEngine) -> None:
        for arenas in (self.sources, self.targets):
            arena = arenas.get(id(engine))
            if arena is not None and not arena.region.closed and arena.taken < len(arena.memory) // 2:
                continue
            fresh = self.players.take_arena(engine)
            if fresh is None:
                raise NothingDone
            self.ledger.adopt(fresh)
            arenas[id(engine)] = fresh

    def _reopen(self, engine: RemoteEngine) -> RemoteEngine:
        for rail in list(self.rails_down):  # an engine does not open on an address that is not there
            self._rail_up(rail)
        fresh = self.players.reopen(engine, self.random)
        fresh.begin_round()
        self._welcome(fresh)
        return fresh

    def _tally(self, engine: RemoteEngine) -> Tally | None:
        try:
            return super()._tally(engine)
        except LookupError:
            raise NothingDone from None

    def _checked(self) -> dict[str, Any]:
        return {"verify": True} if self.random.random() < 0.15 else {}

    # ---- what they do, where it is not what simulated ones do

    def _actions(self) -> dict[str, tuple[float, Callable[[], object]]]:
        faults: dict[str, tuple[float, Callable[[], object]]] = {
            "freeze": (3, self._freeze),
            "revoke": (2, self._revoke),
            "regret": (6, self._regret),
        }
        if self.players.transport == "tcp":
            faults["cut"] = (4, self._cut)
            if self.players.network.can_go_down:
                faults["rail-down"] = (2, self._rail_down)
        return super()._actions() | faults

    def _close_region(self) -> None:
        engine = self.random.choice(self._living())
        arena = self.random.choice([self.sources, self.targets])[id(engine)]
        region = arena.region
        assert isinstance(region, RemoteRegion)
        if not region.closed:
            region.close_soon(self.random.choice([0.0, 0.01, 1.0]), lambda: self.ledger.note_closed(arena))

    def _revoke(self) -> None:
        """Revokes a target without reads by its owner, which may use it afterwards."""
        engine = self.random.choice(self._living())
        arena = self.targets[id(engine)]
        region = arena.region
        assert isinstance(region, RemoteRegion)
        own = [op for op in self.ledger.pending if op.transfer._engine is engine]
        if not region.closed and not any(piece.arena is arena for op in own for piece in op.pieces):
            region.revoke_soon(self.random.choice([0.01, 1.0]), lambda: self.ledger.note_closed(arena))

    def _regret(self) -> None:
        """Cancels what was submitted a moment ago, in the midst of it if it is long."""
        before = len(self.ledger.ops)
        for _ in range(self.random.randint(1, 4)):
            self.random.choice([self._write, self._paged, self._scatter])()
        self.pass_time(10 ** self.random.uniform(-5, -3))
        for op in self.ledger.ops[before:]:
            op.transfer.cancel()

    def _release(self) -> None:
        for engine in self._living():
            if (tally := self.shared.get(id(engine))) is not None and not engine.process.frozen_until:
                engine.report([tally.counter.imm])
        super()._release()

    def _close_engine(self) -> None:
        engine = self.random.choice(self._living())
        if len(self._living()) > 2 and self.players.can_reopen(engine):
            self.ledger.note_dead(engine)
            engine.close(self.random.choice([0.0, 0.05]))

    def _kill(self) -> None:
        mortal = [engine for engine in self._living() if engine.name != self.players.spared]
        if len(self._living()) > 1 and mortal:
            self._be_busy()
            engine = self.random.choice(mortal)
            self.ledger.note_dead(engine)
            engine.process.kill()

    # ---- what goes wrong

    def _be_busy(self) -> None:
        """So that what goes wrong does so in the midst of something."""
        for _ in range(self.random.randint(0, 6)):
            with contextlib.suppress(NothingDone):
                self.random.choice([self._write, self._write, self._paged, self._read, self._send])()
        self.pass_time(10 ** self.random.uniform(-5, -3))

    def _freeze(self) -> None:
        self._be_busy()
        self.random.choice(self._living()).process.freeze(10 ** self.random.uniform(-3, 0))

    def _cut(self) -> None:
        self._be_busy()
        chance, seed = self.random.choice([0.1, 0.5, 1.0]), self.random.getrandbits(32)
        self.random.choice(self._living()).process.tell("cut", chance, seed)

    def _rail_down(self) -> None:
        """Takes a rail down for all engines at once, like a switch or a cable that several share."""
        network = self.players.network
        self._be_busy()
        rail = self.random.randrange(len(network.addresses))
        if rail not in self.rails_down:
            self.rails_down.append(rail)
            network.set_rail(rail, "down")
            self.fleet.at(time.monotonic() + 10 ** self.random.uniform(-2.5, 0), lambda: self._rail_up(rail))

    def _rail_up(self, rail: int) -> None:
        if rail in self.rails_down:
            self.rails_down.remove(rail)
            self.players.network.set_rail(rail, "up")

    def _stop_faults(self) -> None:
        if self.random.random() < 0.02:  # long enough for frozen ones to be given up, where that is so
            self.pass_time(4.0)
        self.fleet.thaw_all()
        for rail in list(self.rails_down):
            self._rail_up(rail)
        self.players.restock(self.random)
        for engine in self._living():
            if self.pools[id(engine)].closed:
                self._open_pool(engine)

    # ---- its end

    def _settle(self) -> None:
        """Waits for counts and messages that arrive later than completions; what is left then is wrong."""
        deadline = time.monotonic() + _SETTLE_LIMIT_S
        while time.monotonic() < deadline:
            self.pass_time(_LINGER_S)
            for engine in self.engines:
                engine.report([tally.counter.imm for tally in self.ledger.tallies if tally.engine is engine])
            if all(engine.is_settled for engine in self.engines) and not self.ledger.unsettled():
                return

    def _leave(self) -> None:
        """Releases everything: numbers, pools, arenas, dead peers."""
        for engine in self.engines:
            self.pools[id(engine)].close()
            engine.process.tell("drop-tickets")
            for gone in self.players.gone:
                engine.forget_peer(gone)
        self.players.gone.clear()
        for tally in self.ledger.tallies:
            if not tally.engine.closed:
                tally.counter.release(force=any(op.status not in ("done", "cancelled") for op in tally.ops))
        unsure = {id(piece.arena) for op in self.ledger.ops for piece in op.pieces if piece.is_unsure}
        for arena in self._held(self.ledger.arenas):
            is_dirty = arena.is_closed or arena.region.closed or id(arena) in unsure
            self.players.give_back(arena, is_dirty=is_dirty)
        self.players.next_imm = self.next_imm
        self.players.end_round()

    def _whose(self, op: Op) -> str:
        sender, peers = op.transfer._engine.name, {piece.arena.engine.name for piece in op.pieces}
        if op.receiver is not None:
            return f"{op} of {sender} to {op.receiver.name}, delivered {self.ledger.delivered(op)} times"
        return f"{op} of {sender} with {', '.join(sorted(peers))}"

    def _held(self, arenas: Iterable[Arena]) -> list[Arena]:
        return [arena for arena in arenas if not arena.engine.closed]


__all__ = ["ProcessGone", "Round"]
