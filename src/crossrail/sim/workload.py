"""One seed of the campaign: a world, mixed operations, cancels, closes, restarts, faults; then the checks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast

import numpy as np

from crossrail.campaign.actions import Actions, NothingDone, refusals
from crossrail.campaign.books import Arena, Bytes, Op
from crossrail.campaign.checkers import UNTOUCHED, CheckFailed
from crossrail.engine import Engine
from crossrail.errors import TransportError
from crossrail.sim import NicProfile, World
from crossrail.sim.world import Host

_ARENA_BYTES = (4 << 20) - 4096  # numpy asks for huge pages from 4 MiB on, and zeroing those takes longer than the rest
_STEPS = 40
_STEPS_PER_CHECK = 10
_DRAIN_LIMIT_S = 120.0  # virtual; peers are given up after peer_timeout_s = 2 s

_spare: list[Bytes] = []  # memory of seeds that passed, zeroed: fresh pages from the kernel cost more than all else

# Slow and uneven, so that faults fall into the middle of things.
_ORDERED = NicProfile(
    "ordered", gbps=8.0, latency_us=20.0, completion_us=20.0, jitter_us=30.0, ordered=True, works_max=64
)
_UNORDERED = replace(_ORDERED, name="unordered", ordered=False, jitter_us=200.0)
_NAMELESS = replace(_UNORDERED, name="nameless", names_imm_paths=False)


class Workload(Actions[Engine]):
    """The events of one seed's world."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.world = World(seed, keep_log=False)
        self.hosts: list[Host] = []

    def run(self) -> None:
        """Raises CheckFailed, or whatever else goes wrong."""
        with self.world:
            self._set_up()
            for step in range(_STEPS):
                self.step()
                self.world.run(for_s=10 ** self.random.uniform(-6, -1.5))
                if step % _STEPS_PER_CHECK == 0:
                    self.ledger.check()
            self._stop_faults()
            if not self.ends_within(_DRAIN_LIMIT_S):
                left = ", ".join(map(str, self.ledger.pending[:5]))
                raise CheckFailed(f"{_DRAIN_LIMIT_S:.0f} s after the last fault there is no end of {left}")
            self._check_fences()
            self._check_restarts()
            self._probe()
            self.world.run(for_s=5.0)  # what is late arrives now
            self._check_liveness()
            self.ledger.check_end()
        self.ledger.check()  # and no engine touched anything on its way out
        for arena in self.ledger.arenas:
            arena.memory[: len(arena.memory) if arena.is_closed else arena.taken] = UNTOUCHED
            _spare.append(arena.memory)

    def pass_time(self, for_s: float) -> None:
        self.world.run(for_s=for_s)

    # ---- who is there

    def _set_up(self) -> None:
        profile = self.random.choice([_ORDERED, _ORDERED, _UNORDERED, _UNORDERED, _NAMELESS])
        longest = self.random.choice([1 << 30, 300_000])
        profile = replace(profile, works_max=self.random.choice([4, 64]), work_bytes_max=longest)
        for number in range(self.random.randint(2, 4)):
            rails = self.random.choice([1, 2, 2, 3, 4])
            self.hosts.append(self.world.host(f"h{number}", nic=[profile] * rails))
        for host in self.hosts:
            self._open(host, f"e{host.name[1:]}")
        if self.random.random() < 0.3:
            self._open(self.hosts[0], "neighbour")

    def _open(self, host: Host, name: str) -> Engine:
        beat_s = self.random.choice([None, None, 0.02, 0.2, 1.0])
        engine = host.engine(name, peer_timeout_s=2.0, connect_timeout_s=2.0, heartbeat_s=beat_s)
        engine.on_event(lambda _: None)
        self.engines.append(engine)
        self._add_arenas(engine)
        self._open_pool(engine)
        return engine

    def _add_arenas(self, engine: Engine) -> None:
        for arenas in (self.sources, self.targets):
            arena = arenas.get(id(engine))
            if arena is not None and not arena.region.closed and arena.taken < len(arena.memory) // 2:
                continue
            for _ in range(20):  # registrations may be made to fail
                try:
                    memory = _spare.pop() if _spare else np.zeros(_ARENA_BYTES, np.uint8)
                    arenas[id(engine)] = self.ledger.arena(engine, memory)
                    break
                except TransportError:
                    _spare.append(memory)
            else:
                raise CheckFailed(
                    f"engine {engine.name!r} cannot register memory, long after registrations were failed"
                )

    # ---- what they do

    def _actions(self) -> dict[str, tuple[float, Callable[[], object]]]:
        more: dict[str, tuple[float, Callable[[], object]]] = {
            "spoil": (1, self._spoil),
            "revoke": (7, self._revoke),
            "renew": (5, self._renew),
            "stale": (3, self._write_by_a_stale_descriptor),
        }
        return super()._actions() | more | {name: (weight, self._fault(name)) for name, weight in _FAULTS.items()}

    def _checked(self) -> dict[str, Any]:
        return {"verify": True} if self.random.random() < 0.15 else {}

    def _spoil(self) -> None:
        """A checked write that is damaged on its way."""
        engine, peer = self._pair()
        if peer.closed:
            raise NothingDone
        with refusals():
            self.ledger.spoiled_write(self._source(engine), self._target(peer), self._length(), self.ledger.tally(peer))

    def _write_by_a_stale_descriptor(self) -> None:
        """Writes like a writer that was replaced and does not know it."""
        engine = self.random.choice(self._living())
        targets = [arena for arena in self.targets.values() if arena.older]
        if not targets:
            raise NothingDone
        target = self.random.choice(targets)
        by = self.random.choice(target.older)
        tally = self._tally(cast("Engine", target.engine))
        with refusals():
            self.ledger.write(self._source(engine), target, self._length(), tally, by=by, **self._checked())

    def _revoke(self) -> None:
        engine = self.random.choice(self._living())
        arena = self.random.choice([self.sources, self.targets])[id(engine)]
        if arena.region.closed:
            raise NothingDone
        with _failed_registrations():
            is_out = self.ledger.revoke_arena(arena, self.random.choice([0.0, 0.01, 10.0]))
            if is_out and self.random.random() < 0.5:
                self.ledger.renew_arena(arena)

    def _renew(self) -> None:
        """Renews one of the regions that are revoked, or are to be."""
        arenas = [arena for arena in self._arenas_in_use() if arena.is_fencing or arena.is_fenced]
        if not arenas:
            raise NothingDone
        arena = self.random.choice(arenas)
        with _failed_registrations():
            if arena.is_fenced or self.ledger.revoke_arena(arena, 0.01):
                self.ledger.renew_arena(arena)

    def _arenas_in_use(self) -> list[Arena]:
        return [
            arena for arena in self.ledger.arenas if not arena.region.closed and not self.ledger.is_dead(arena.engine)
        ]

    def _close_region(self) -> None:
        engine = self.random.choice(self._living())
        arena = self.random.choice([self.sources, self.targets])[id(engine)]
        self.ledger.close_arena(arena, self.random.choice([0.0, 0.01, 10.0]))

    def _close_engine(self) -> None:
        if len(self._living()) > 2:
            engine = self.random.choice(self._living())
            self.ledger.note_dead(engine)
            engine.close(self.random.choice([0.0, 0.05]))

    def _kill(self) -> None:
        if len(self._living()) > 1:
            engine = self.random.choice(self._living())
            self.ledger.note_dead(engine)
            self.world.kill(engine)

    def _reopen(self, engine: Engine) -> Engine:
        host = next(host for host in self.hosts if engine.name in (f"e{host.name[1:]}", "neighbour"))
        self.engines.remove(engine)
        return self._open(host, engine.name)

    def _write_to(self, peer: Engine, engine: Engine) -> Op:
        for arenas, owner in ((self.sources, engine), (self.targets, peer)):
            arenas.pop(id(owner), None)
        return super()._write_to(peer, engine)

    # ---- what goes wrong

    def _fault(self, name: str) -> Callable[[], None]:
        def happen() -> None:
            world, host = self.world, self.random.choice(self.hosts)
            rail = self.random.randrange(len(host.rails))
            one_or_all = self.random.choice([rail, None])
            for_s = 10 ** self.random.uniform(-4, 0.7)
            if name == "rail-down":
                world.rail_down(host, rail, for_s=for_s)
            elif name == "freeze":
                world.freeze(self.random.choice(self._living()), for_s=for_s)
            elif name == "partition":
                others = [other for other in self.hosts if other is not host]
                world.partition([host], self.random.sample(others, self.random.randint(1, len(others))), for_s=for_s)
            elif name == "silence":
                others = [other for other in self.hosts if other is not host]
                world.silence([host], self.random.sample(others, self.random.randint(1, len(others))), for_s=for_s)
            elif name == "slow":
                world.slow(host, rail, self.random.choice([3.0, 50.0]), for_s=for_s)
            elif name == "fail-works":
                chance, count = self.random.choice([0.0, 0.02, 0.2]), self.random.choice([0, 1, 4])
                world.fail_works(host, chance=chance, count=count, rail=one_or_all)
                world.fail_works(host, rail=one_or_all, at_s=world.now_s + for_s)
            elif name == "withhold":
                world.withhold_completions(host, rail=one_or_all, for_s=for_s)
            elif name == "fill-queue":
                world.fill_queue(host, rail, for_s=for_s)
            elif name == "fail-registrations":
                world.fail_registrations(host, self.random.randint(1, 3), rail=one_or_all)
            else:
                world.lose_datagrams(self.random.choice([0.0, 0.3]), doubling=self.random.choice([0.0, 0.3]))

        return happen

    def _stop_faults(self) -> None:
        self.world.run(for_s=6.0)  # those with an end
        for host in self.hosts:
            for rail in (None, *range(len(host.rails))):
                self.world.fail_works(host, rail=rail)
                self.world.fail_registrations(host, 0, rail=rail)
        self.world.lose_datagrams(0.0)
        for engine in self._living():
            if self.pools[id(engine)].closed:
                self._open_pool(engine)

    def _check_fences(self) -> None:
        """Whoever was at a region when it was revoked has left it by now."""
        for arena in self._arenas_in_use():
            if arena.is_fencing and not self.ledger.revoke_arena(arena, 1.0):
                raise CheckFailed(f"a region of {arena.engine.name!r} is still in quarantine")

    def _check_liveness(self) -> None:
        """No engine that moves may be reported as frozen."""
        for engine in self._living():
            for peer in self._living():
                state = engine.peer_state(peer.address)
                if state in ("slow", "frozen"):
                    raise CheckFailed(f"all faults are over, and {engine.name!r} takes {peer.name!r} for {state}")

    def _check_restarts(self) -> None:
        """An engine restarted under a lost one's name is another peer: reachable at once, with nothing forgotten."""
        living = self._living()
        if all(not engine.closed for engine in self.engines) and len(living) > 1 and self.random.random() < 0.3:
            self.ledger.note_dead(living[-1])
            self.world.kill(living[-1])
            self.world.run(for_s=6.0)
        super()._check_restarts()


# Faults and how often they happen.
_FAULTS = {
    "rail-down": 3, "freeze": 2, "partition": 1, "silence": 0.5, "slow": 1, "fail-works": 4, "withhold": 2,
    "fill-queue": 1.5, "fail-registrations": 0.5, "lose-datagrams": 1,
}  # fmt: skip


@contextlib.contextmanager
def _failed_registrations() -> Iterator[None]:
    """Made to fail, they leave everything as it was."""
    try:
        yield
    except TransportError as error:
        if error.call != "register_memory":
            raise
