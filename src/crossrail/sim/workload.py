"""One seed's worth of the campaign: a world, mixed operations, cancels, closes, restarts, faults; then the checks."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from crossrail.engine import Engine
from crossrail.errors import CrossrailError, TransportError, UsageError
from crossrail.messages import ReceivePool
from crossrail.sim import NicProfile, World
from crossrail.sim.checkers import UNTOUCHED, Arena, Bytes, CheckFailed, Ledger, Op, Tally, ends_within
from crossrail.sim.world import Host

_ARENA_BYTES = (4 << 20) - 4096  # numpy asks for huge pages from 4 MiB on, and zeroing those takes longer than the rest
_STEPS = 40
_STEPS_PER_CHECK = 10
_DRAIN_LIMIT_S = 120.0  # virtual; peers are given up after peer_timeout_s = 2 s
_PROBE_LIMIT_S = 30.0
_PROBES = 3

_spare: list[Bytes] = []  # memory of seeds that passed, zeroed: fresh pages from the kernel cost more than all else

# What the engine does with them: one work; the same; a piece for each rail; pieces in slices; even slices, at the end
# the count.
_LENGTHS = {
    "short": (1, 100),
    "page": (101, 70_000),
    "pieces": (130_000, 400_000),
    "slices": (1_100_000, 1_400_000),
    "evened": (2_100_000, 2_600_000),
}

# Slow and uneven, so that faults fall into the middle of things.
_ORDERED = NicProfile(
    "ordered", gbps=8.0, latency_us=20.0, completion_us=20.0, jitter_us=30.0, ordered=True, works_max=64
)
_UNORDERED = replace(_ORDERED, name="unordered", ordered=False, jitter_us=200.0)
_NAMELESS = replace(_UNORDERED, name="nameless", names_imm_paths=False)


class Workload:
    """What happens in the world of one seed."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.world = World(seed, keep_log=False)
        self.ledger = Ledger(seed)
        self.hosts: list[Host] = []
        self.engines: list[Engine] = []
        self.sources: dict[int, Arena] = {}
        self.targets: dict[int, Arena] = {}
        self.pools: dict[int, ReceivePool] = {}
        self.shared: dict[int, Tally] = {}
        self.done: dict[str, int] = {}
        self.released: set[tuple[int, int]] = set()  # engine, number
        self.next_imm = 1
        self.incarnations = 0

    def run(self) -> None:
        """Raises CheckFailed, or whatever else goes wrong."""
        with self.world:
            self._set_up()
            actions = self._actions()
            names = list(actions)
            weights = [actions[name][0] for name in names]
            for step in range(_STEPS):
                name = self.random.choices(names, weights)[0]
                self.done[name] = self.done.get(name, 0) + 1
                with contextlib.suppress(_Refused):
                    actions[name][1]()
                self.world.run(for_s=10 ** self.random.uniform(-6, -1.5))
                if step % _STEPS_PER_CHECK == 0:
                    self.ledger.check()
            self._stop_faults()
            if not ends_within(self.ledger, lambda step_s: self.world.run(for_s=step_s), _DRAIN_LIMIT_S):
                left = ", ".join(map(str, self.ledger.pending[:5]))
                raise CheckFailed(f"{_DRAIN_LIMIT_S:.0f} s after the last fault there is no end of {left}")
            self._check_restarts()
            self._probe()
            self.world.run(for_s=5.0)  # what is late arrives now
            self.ledger.check_end()
        self.ledger.check()  # and no engine touched anything on its way out
        for arena in self.ledger.arenas:
            arena.memory[: len(arena.memory) if arena.is_closed else arena.taken] = UNTOUCHED
            _spare.append(arena.memory)

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
        self.incarnations += 1
        engine = host.engine(name, peer_timeout_s=2.0, connect_timeout_s=2.0)
        engine.on_event(lambda event: None)
        self.engines.append(engine)
        self._add_arenas(engine)
        self._open_pool(engine)
        return engine

    def _open_pool(self, engine: Engine) -> None:
        pool = engine.submit_recvs(4, 65536, lambda message: self.ledger.note_message(bytes(message.data)))
        self.pools[id(engine)] = pool

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

    def _pair(self) -> tuple[Engine, Engine]:
        """Who submits, and the other one: perhaps itself, perhaps dead by now."""
        engine = self.random.choice(self._living())
        peer = engine if self.random.random() < 0.05 else self.random.choice(self.engines)
        return engine, peer

    def _living(self) -> list[Engine]:
        living = [engine for engine in self.engines if not engine.closed]
        if not living:
            raise _Refused
        return living

    def _source(self, engine: Engine) -> Arena:
        self._add_arenas(engine)
        return self.sources[id(engine)]

    def _target(self, engine: Engine) -> Arena:
        if not engine.closed:
            self._add_arenas(engine)
        return self.targets[id(engine)]

    def _tally(self, engine: Engine) -> Tally | None:
        """Of one operation alone, of several, or none."""
        kind = self.random.random()
        if kind < 0.15 or engine.closed:
            return None
        shared = self.shared.get(id(engine))
        if kind < 0.5 and shared is not None:
            return shared
        tally = self.ledger.tally(engine)
        if (id(engine), tally.counter.imm) in self.released:
            raise CheckFailed(f"immediate {tally.counter.imm} was released, and is handed out again at once")
        if kind < 0.5:
            self.shared[id(engine)] = tally
        return tally

    def _length(self) -> int:
        kind = self.random.choices(["short", "page", "pieces", "slices", "evened"], [6, 6, 4, 2, 1])[0]
        least, most = _LENGTHS[kind]
        return self.random.randint(least, most)

    # ---- what they do

    def _actions(self) -> dict[str, tuple[float, Callable[[], object]]]:
        return {
            "write": (30, self._write),
            "read": (6, self._read),
            "paged": (10, self._paged),
            "scatter": (6, self._scatter),
            "barrier": (4, self._barrier),
            "send": (10, self._send),
            "cancel": (14, self._cancel),
            "pool": (1.5, self._swap_pool),
            "close-region": (2, self._close_region),
            "release": (2, self._release),
            "forget": (1, self._forget),
            "close-engine": (0.7, self._close_engine),
            "kill": (1.2, self._kill),
            "restart": (2, self._restart),
            **{name: (weight, self._fault(name)) for name, weight in _FAULTS.items()},
        }

    def _write(self) -> None:
        for _ in range(self.random.choice([1, 1, 2, 8])):
            engine, peer = self._pair()
            tally = self._tally(peer)
            pinned = {"rail": self.random.randrange(engine.rails)} if self.random.random() < 0.15 else {}
            with _refusals():
                self.ledger.write(self._source(engine), self._target(peer), self._length(), tally, **pinned)

    def _read(self) -> None:
        engine, peer = self._pair()
        if peer.closed:  # its memory cannot be filled any more
            raise _Refused
        with _refusals():
            self.ledger.read(self._target(engine), self._source(peer), self._length())

    def _paged(self) -> None:
        engine, peer = self._pair()
        count = self.random.choice([1, 13, 40, 200])
        page_bytes = self.random.choice([16, 512, 4096])
        first = list(range(count))
        second = list(range(count))
        if self.random.random() < 0.5:
            self.random.shuffle(second)
        tally = self._tally(peer)
        with _refusals():
            self.ledger.paged_writes(self._source(engine), self._target(peer), first, second, page_bytes, tally)

    def _scatter(self) -> None:
        engine = self.random.choice(self._living())
        peers = self.random.sample(self.engines, self.random.randint(1, len(self.engines)))
        lengths = [self.random.randint(1, 50_000) for _ in peers]
        self.next_imm += 1
        with _refusals():
            self.ledger.scatter(self._source(engine), [self._target(peer) for peer in peers], lengths, self.next_imm)

    def _barrier(self) -> None:
        engine = self.random.choice(self._living())
        peers = self.random.sample(self.engines, self.random.randint(1, len(self.engines)))
        self.next_imm += 1
        with _refusals():
            self.ledger.barrier(engine, peers, self.next_imm)

    def _send(self) -> None:
        for _ in range(self.random.choice([1, 1, 6])):
            engine, peer = self._pair()
            nbytes = self.random.choice([8, 100, 5000, 65536])
            with _refusals():
                self.ledger.send(engine, peer, nbytes)

    def _swap_pool(self) -> None:
        """Closes the pool of buffers, or opens another: meanwhile senders wait."""
        engine = self.random.choice(self._living())
        if self.pools[id(engine)].closed:
            self._open_pool(engine)
        else:
            self.pools[id(engine)].close()

    def _cancel(self) -> None:
        pending = self.ledger.pending
        for op in self.random.sample(pending, min(len(pending), self.random.choice([1, 1, 3]))):
            op.transfer.cancel()

    def _close_region(self) -> None:
        engine = self.random.choice(self._living())
        arena = self.random.choice([self.sources, self.targets])[id(engine)]
        self.ledger.close_arena(arena, self.random.choice([0.0, 0.01, 10.0]))

    def _release(self) -> None:
        """Of a number that nobody will send any more."""
        for tally in [tally for tally in self.shared.values() if all(op.completions for op in tally.ops)]:
            if tally.engine.closed or any(op.status != "done" for op in tally.ops):
                continue
            if tally.counter.poll() < sum(op.counts[tally] for op in tally.ops):
                continue
            self.ledger.retire(tally)
            self.released.add((id(tally.engine), tally.counter.imm))
            del self.shared[id(tally.engine)]
            tally.counter.release()
            return

    def _forget(self) -> None:
        engine, peer = self._pair()
        if peer is not engine:
            self.ledger.note_given_up(engine, peer)
            engine.forget_peer(peer.address)

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

    def _restart(self) -> None:
        """The same name, another incarnation."""
        dead = [engine for engine in self.engines if engine.closed]
        if dead:
            self._reopen(self.random.choice(dead))

    def _reopen(self, engine: Engine) -> Engine:
        host = next(host for host in self.hosts if engine.name in (f"e{host.name[1:]}", "neighbour"))
        self.engines.remove(engine)
        return self._open(host, engine.name)

    # ---- what goes wrong

    def _fault(self, name: str) -> Callable[[], None]:
        def happen() -> None:
            world, host = self.world, self.random.choice(self.hosts)
            rail = self.random.randrange(len(host.rails))
            for_s = 10 ** self.random.uniform(-4, 0.7)
            if name == "rail-down":
                world.rail_down(host, rail, for_s=for_s)
            elif name == "freeze":
                world.freeze(self.random.choice(self._living()), for_s=for_s)
            elif name == "partition":
                others = [other for other in self.hosts if other is not host]
                world.partition([host], self.random.sample(others, self.random.randint(1, len(others))), for_s=for_s)
            elif name == "slow":
                world.slow(host, rail, self.random.choice([3.0, 50.0]), for_s=for_s)
            elif name == "fail-works":
                world.fail_works(host, chance=self.random.choice([0.0, 0.02, 0.2]), count=self.random.choice([0, 1, 4]))
                world.fail_works(host, at_s=world.now_s + for_s)
            elif name == "withhold":
                world.withhold_completions(host, for_s=for_s)
            elif name == "fill-queue":
                world.fill_queue(host, rail, for_s=for_s)
            elif name == "fail-registrations":
                world.fail_registrations(host, self.random.randint(1, 3))
            else:
                world.lose_datagrams(self.random.choice([0.0, 0.3]), doubling=self.random.choice([0.0, 0.3]))

        return happen

    def _stop_faults(self) -> None:
        self.world.run(for_s=6.0)  # those with an end
        for host in self.hosts:
            self.world.fail_works(host)
            self.world.fail_registrations(host, 0)
        self.world.lose_datagrams(0.0)
        for engine in self._living():
            if self.pools[id(engine)].closed:
                self._open_pool(engine)

    def _check_restarts(self) -> None:
        """Who was restarted under the name of a lost one is another peer: reached at once, with nothing forgotten."""
        living = self._living()
        dead = [engine for engine in self.engines if engine.closed]
        if not dead and len(living) > 1 and self.random.random() < 0.3:
            dead = [living.pop()]
            self.ledger.note_dead(dead[0])
            self.world.kill(dead[0])
            self.world.run(for_s=6.0)
        for engine in dead:
            fresh = self._reopen(engine)
            ops = [self._write_to(fresh, engine) for engine in living]
            ends_within(self.ledger, lambda step_s: self.world.run(for_s=step_s), _PROBE_LIMIT_S)
            for op in ops:
                if op.status != "done":
                    raise CheckFailed(f"{op} to {fresh.name!r}, which was restarted, fails: {_why(op.transfer)}")

    def _write_to(self, peer: Engine, engine: Engine) -> Op:
        for arenas, owner in ((self.sources, engine), (self.targets, peer)):
            arenas.pop(id(owner), None)
        op = self.ledger.write(self._source(engine), self._target(peer), 3000, self.ledger.tally(peer))
        assert op is not None
        return op

    def _probe(self) -> None:
        """Everybody who lives reaches everybody who lives, once both have heard that one gave the other up."""
        pairs = [(engine, peer) for engine in self._living() for peer in self._living()]
        for _ in range(_PROBES):
            for engine, peer in pairs:
                if engine.peer_state(peer.address) == "lost":
                    self.ledger.note_given_up(engine, peer)
                    engine.forget_peer(peer.address)
            ops = [self._write_to(peer, engine) for engine, peer in pairs]
            ends_within(self.ledger, lambda step_s: self.world.run(for_s=step_s), _PROBE_LIMIT_S)
            failed = [(pair, op) for pair, op in zip(pairs, ops, strict=True) if op.status != "done"]
            # Who was forgotten hears of it by the other's new beginning, at the cost of what it had submitted.
            if not failed or any(op.status != "peer-lost" for _, op in failed):
                break
        for (engine, peer), op in failed:
            why = _why(op.transfer)
            raise CheckFailed(f"all faults are over, and {op} of {engine.name!r} to {peer.name!r} fails: {why}")


# Faults and how often they happen.
_FAULTS = {
    "rail-down": 3, "freeze": 2, "partition": 1.5, "slow": 1, "fail-works": 4, "withhold": 2, "fill-queue": 1.5,
    "fail-registrations": 0.5, "lose-datagrams": 1,
}  # fmt: skip


class _Refused(Exception):
    """There is nobody to do it, or the engine said no to a submit, as it may."""


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """A submit to what is closed, or with it, is refused: that is an answer."""
    try:
        yield
    except (UsageError, TransportError) as error:
        if "closed" not in str(error):
            raise
        raise _Refused from error


def _why(transfer: object) -> str:
    try:
        transfer.wait(0)  # type: ignore[attr-defined]
    except CrossrailError as error:
        return str(error)
    return "no reason"
