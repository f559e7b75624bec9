"""The actions of a campaign, drawn from a seed: mixed operations, cancels, closes, restarts."""

from __future__ import annotations

import contextlib
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from crossrail.campaign.books import Arena, Op, Tally
from crossrail.campaign.checkers import CheckFailed, Ledger, ends_within
from crossrail.campaign.parts import AnyEngine, AnyPool
from crossrail.errors import CrossrailError, TransportError, UsageError

E = TypeVar("E", bound=AnyEngine)

_PROBE_LIMIT_S = 30.0
_PROBES = 3

# How the engine sends these lengths: as one work; as one work; as one piece per rail; as slices; as even slices, with
# the count at the end.
_LENGTHS = {
    "short": (1, 100),
    "page": (101, 70_000),
    "pieces": (130_000, 400_000),
    "slices": (1_100_000, 1_400_000),
    "evened": (2_100_000, 2_600_000),
}


class Actions(ABC, Generic[E]):
    """Engines, and what they are made to do. One thread.

    A subclass opens engines and gives them arenas, lets time pass, and knows what can go wrong with them.
    """

    step_s = 0.25  # how much time passes between two looks whether everything has ended

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.ledger = Ledger(seed)
        self.engines: list[E] = []
        self.sources: dict[int, Arena] = {}
        self.targets: dict[int, Arena] = {}
        self.pools: dict[int, AnyPool] = {}
        self.shared: dict[int, Tally] = {}
        self.done: dict[str, int] = {}
        self.released: set[tuple[int, int]] = set()  # engine, number
        self.next_imm = 1

    @abstractmethod
    def pass_time(self, for_s: float) -> None:
        """Lets everything run for so long."""

    @abstractmethod
    def _reopen(self, engine: E) -> E:
        """Opens another incarnation in place of a closed engine."""

    @abstractmethod
    def _add_arenas(self, engine: E) -> None:
        """Sees that it has a source and a target that are open and have room."""

    @abstractmethod
    def _close_region(self) -> None: ...

    @abstractmethod
    def _close_engine(self) -> None: ...

    @abstractmethod
    def _kill(self) -> None: ...

    def step(self) -> None:
        """Takes one action, or tries to."""
        actions = self._actions()
        name = self.random.choices(list(actions), [weight for weight, _ in actions.values()])[0]
        self.done[name] = self.done.get(name, 0) + 1
        with contextlib.suppress(NothingDone):
            actions[name][1]()

    def ends_within(self, limit_s: float) -> bool:
        """Whether every operation completes."""
        return ends_within(self.ledger, self.pass_time, limit_s, self.step_s)

    # ---- who is there

    def _open_pool(self, engine: E) -> None:
        pool = engine.submit_recvs(4, 65536, lambda message: self.ledger.note_message(bytes(message.data)))
        self.pools[id(engine)] = pool

    def _pair(self) -> tuple[E, E]:
        """The submitter and the other engine, which may be the same one, or dead by now."""
        engine = self.random.choice(self._living())
        peer = engine if self.random.random() < 0.05 else self.random.choice(self.engines)
        return engine, peer

    def _living(self) -> list[E]:
        living = [engine for engine in self.engines if not engine.closed]
        if not living:
            raise NothingDone
        return living

    def _source(self, engine: E) -> Arena:
        self._add_arenas(engine)
        return self.sources[id(engine)]

    def _target(self, engine: E) -> Arena:
        if not engine.closed:
            self._add_arenas(engine)
        return self.targets[id(engine)]

    def _tally(self, engine: E) -> Tally | None:
        """A tally for one operation alone, for several, or none."""
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

    def _checked(self) -> dict[str, Any]:
        """Options of what moves bytes: whether it is verified."""
        return {}

    # ---- what they do

    def _actions(self) -> dict[str, tuple[float, Callable[[], object]]]:
        """The actions by name, each with its weight."""
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
        }

    def _write(self) -> None:
        for _ in range(self.random.choice([1, 1, 2, 8])):
            engine, peer = self._pair()
            tally = self._tally(peer)
            pinned: dict[str, Any] = (
                {"rail": self.random.randrange(engine.rails)} if self.random.random() < 0.15 else {}
            )
            with refusals():
                self.ledger.write(
                    self._source(engine), self._target(peer), self._length(), tally, **pinned, **self._checked()
                )

    def _read(self) -> None:
        engine, peer = self._pair()
        if peer.closed:  # its memory cannot be filled any more
            raise NothingDone
        with refusals():
            self.ledger.read(self._target(engine), self._source(peer), self._length(), **self._checked())

    def _paged(self) -> None:
        engine, peer = self._pair()
        count = self.random.choice([1, 13, 40, 200])
        page_bytes = self.random.choice([16, 512, 4096])
        first = list(range(count))
        second = list(range(count))
        if self.random.random() < 0.5:
            self.random.shuffle(second)
        tally = self._tally(peer)
        with refusals():
            source, target = self._source(engine), self._target(peer)
            self.ledger.paged_writes(source, target, first, second, page_bytes, tally, **self._checked())

    def _scatter(self) -> None:
        engine = self.random.choice(self._living())
        peers = self.random.sample(self.engines, self.random.randint(1, len(self.engines)))
        lengths = [self.random.randint(1, 50_000) for _ in peers]
        self.next_imm += 1
        with refusals():
            source, targets = self._source(engine), [self._target(peer) for peer in peers]
            self.ledger.scatter(source, targets, lengths, self.next_imm, **self._checked())

    def _barrier(self) -> None:
        engine = self.random.choice(self._living())
        peers = self.random.sample(self.engines, self.random.randint(1, len(self.engines)))
        self.next_imm += 1
        with refusals():
            self.ledger.barrier(engine, peers, self.next_imm)

    def _send(self) -> None:
        for _ in range(self.random.choice([1, 1, 6])):
            engine, peer = self._pair()
            nbytes = self.random.choice([8, 100, 5000, 65536])
            with refusals():
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

    def _release(self) -> None:
        """Releases a number that nobody will send any more."""
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

    def _restart(self) -> None:
        """Opens another incarnation under the same name."""
        dead = [engine for engine in self.engines if engine.closed]
        if dead:
            self._reopen(self.random.choice(dead))

    # ---- what has to be possible once faults are over

    def _check_restarts(self) -> None:
        """An engine restarted under a lost one's name is another peer: reachable at once, with nothing forgotten."""
        living = self._living()
        for engine in [engine for engine in self.engines if engine.closed]:
            fresh = self._reopen(engine)
            ops = [self._write_to(fresh, engine) for engine in living]
            self.ends_within(_PROBE_LIMIT_S)
            for op in ops:
                if op.status != "done":
                    raise CheckFailed(f"{op} to {fresh.name!r}, which was restarted, fails: {_why(op)}")

    def _write_to(self, peer: E, engine: E) -> Op:
        op = self.ledger.write(self._source(engine), self._target(peer), 3000, self.ledger.tally(peer))
        assert op is not None
        return op

    def _probe(self) -> None:
        """Every live engine reaches every other, once both have heard that one had given the other up."""
        pairs = [(engine, peer) for engine in self._living() for peer in self._living()]
        for _ in range(_PROBES):
            for engine, peer in pairs:
                if engine.peer_state(peer.address) == "lost":
                    self.ledger.note_given_up(engine, peer)
                    engine.forget_peer(peer.address)
            ops = [self._write_to(peer, engine) for engine, peer in pairs]
            self.ends_within(_PROBE_LIMIT_S)
            failed = [(pair, op) for pair, op in zip(pairs, ops, strict=True) if op.status != "done"]
            # An engine that was forgotten learns of it when the other connects again, at the cost of what it had
            # submitted.
            if not failed or any(op.status != "peer-lost" for _, op in failed):
                break
        for (engine, peer), op in failed:
            why = _why(op)
            raise CheckFailed(f"all faults are over, and {op} of {engine.name!r} to {peer.name!r} fails: {why}")


class NothingDone(Exception):
    """Nobody could do it, or the engine refused a submit, as it may."""


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """A submit to what is closed, or with it, is refused: that is an answer."""
    try:
        yield
    except (UsageError, TransportError) as error:
        if "closed" not in str(error):
            raise
        raise NothingDone from error


def _why(op: Op) -> str:
    try:
        op.transfer.wait(0)
    except CrossrailError as error:
        return str(error)
    return "no reason"
