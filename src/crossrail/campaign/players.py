"""The four processes of a campaign, an engine in each. They live on from round to round; a killed one is replaced."""

from __future__ import annotations

import contextlib
import functools
import random

from crossrail.campaign.books import Arena
from crossrail.campaign.checkers import UNTOUCHED, CheckFailed
from crossrail.campaign.network import RAILS, Network
from crossrail.campaign.process import SLOT_BYTES, Fleet, Process, ProcessGone
from crossrail.campaign.remote import RemoteEngine
from crossrail.peers import Address

TRANSPORTS = ("shm", "tcp")
_ARENAS = 4  # sources, and as many targets, of an engine in a round
_CLOSE_LIMIT_S = 20.0
_COUNT = 4


class Players:
    """The engines, and arenas for the next round. spared: who is never killed. One thread."""

    def __init__(self, transport: str, spared: str = "") -> None:
        self.transport = transport
        self.network = _network()
        self.spared = spared
        self.fleet = Fleet()
        self.engines: list[RemoteEngine] = []
        self.next_imm = 1  # for those who choose numbers themselves
        self.gone: list[Address] = []  # dead, and perhaps still known to the living
        self.started = 0
        self._stock: dict[int, list[Arena]] = {}
        draw = random.Random(0)
        for number in range(_COUNT):
            self.open(f"player-{number}", draw)

    def open(self, name: str, draw: random.Random) -> RemoteEngine:
        """An engine in a process of its own."""
        self.started += 1
        return self._open_in(self.fleet.start(name), name, draw)

    def reopen(self, engine: RemoteEngine, draw: random.Random) -> RemoteEngine:
        """Another incarnation in the place of one that is closed: in its process if that lives."""
        self.engines.remove(engine)
        self.gone.append(engine.address)
        self._stock.pop(id(engine))
        if not engine.process.is_alive:
            return self.open(engine.name, draw)
        if left := engine.left_behind():
            raise CheckFailed(f"engine {engine.name!r} was closed and left behind {left}")
        process = engine.process
        process.slots_resting = [slot for slot in range(len(process.slots)) if slot not in process.slots_free]
        return self._open_in(process, engine.name, draw)

    def can_reopen(self, engine: RemoteEngine) -> bool:
        """Whether its process has memory for another one in this round."""
        return len(engine.process.slots_free) >= 2 * _ARENAS

    def take_arena(self, engine: RemoteEngine) -> Arena | None:
        """An arena that nobody has; None if there are no more."""
        stock = self._stock[id(engine)]
        return stock.pop() if stock else None

    def give_back(self, arena: Arena, *, is_dirty: bool) -> None:
        """Takes an arena back after a round. is_dirty: bytes may still arrive, so its region has to be closed first."""
        engine = arena.engine
        assert isinstance(engine, RemoteEngine)
        if engine.closed:
            return
        if is_dirty:
            try:
                arena.region.close(_CLOSE_LIMIT_S)
            except TimeoutError as error:
                raise CheckFailed(f"nothing goes on, and a region cannot be closed: {error}") from error
        else:
            arena.memory[: arena.taken] = UNTOUCHED
            self._stock[id(engine)].append(arena)

    def restock(self, draw: random.Random) -> None:
        """Sees that everybody who lives has arenas for a round."""
        for engine in self.engines:
            if not engine.closed:
                self._fill(engine, draw)

    def end_round(self) -> None:
        """Engines closed in this round are not examined any more."""
        for process in self.fleet.processes:
            process.free_slots()

    def dump(self, folder: str) -> None:
        """Writes there what the flight recorders hold, and what each engine knows of its peers."""
        for engine in self.engines:
            if engine.process.is_alive:
                with contextlib.suppress(ProcessGone, CheckFailed):  # it has crashed, or hangs: no word of it then
                    engine.process.ask("dump", f"{folder}/{engine.name}.json")

    def close(self) -> None:
        """Ends all of them."""
        self.fleet.close()

    def _open_in(self, process: Process, name: str, draw: random.Random) -> RemoteEngine:
        engine = RemoteEngine(process, name, RAILS, self.network.engine_options(self.transport, draw))
        self.engines.append(engine)
        self._stock[id(engine)] = []
        self._fill(engine, random.Random(engine.process.pid))
        return engine

    def _fill(self, engine: RemoteEngine, draw: random.Random) -> None:
        """Restocks an engine with arenas: in memory that its process shares with us, over shm also in mapped memory."""
        stock = self._stock[id(engine)]
        while len(stock) < 2 * _ARENAS:
            free = engine.process.slots_free
            if self.transport == "shm" and draw.random() < 0.5:
                region = engine.alloc(SLOT_BYTES)
            elif free:
                region = engine.register(engine.process.slots[free[0]])
            else:
                return
            stock.append(Arena(engine, region.memory, region))


@functools.cache
def _network() -> Network:
    """The network shared by all players of this process."""
    return Network()
