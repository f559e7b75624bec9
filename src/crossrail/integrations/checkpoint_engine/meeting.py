"""How ranks agree about a call that all of them make: through the torch.distributed store that checkpoint-engine opens
at rank 0.

No process group of torch.distributed is needed, and no wait is without an end: a rank that fails says so to the others,
one that died is missed by the rank before it, and one that is silent for too long is named.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

import msgspec
from msgspec import Struct

import crossrail as xr
from crossrail.errors import CrossrailError, WaitTimeout
from crossrail.integrations.checkpoint_engine.errors import CheckpointUpdateFailed

if TYPE_CHECKING:
    from torch.distributed import Store

_LOOK_S = 0.05  # between looks at whether another has failed
_PAUSE_S = (0.001, 0.05)  # pauses between polls for others' messages: the first, and the longest
_LEAVING_S = 5.0
_CONNECT_S = 1.0  # to a rank that has not begun: one that is frozen is waited for
_OWN_WORD_S = 2.0  # for a rank whose own step has timed out: its report tells more than its silence
_FAILED = "failed"


class Hello(Struct):
    """What each rank sends first. call: for people; the same on all ranks. metas: as JSON, of gather_metas.

    engine: its address. sockets: how many it has named so far. refusal: why it cannot take part; empty: it can.
    """

    call: str
    device_uuid: str
    engine: bytes
    sockets: int
    metas: str = ""
    refusal: str = ""


class Done(Struct):
    """What a rank says at the end of a stage."""


T = TypeVar("T", Hello, Done)


def announce(store: Store, rank: int, engine: xr.Engine) -> None:
    """Lets other ranks notice from now on when this one dies before it makes a call."""
    store.set(_announced(rank), bytes(engine.address))


def _announced(rank: int) -> str:
    return f"crossrail/engine/{rank}"


class Meeting:
    """One rank's part in one call. A context manager: what is raised within is told to the others, and raised as
    CheckpointUpdateFailed.

    Threads: one. number: of this call among all such of this rank, the same at all ranks. timeout_s: how long a wait
    may be without a sign of whom it is for.
    """

    def __init__(self, store: Store, rank: int, ranks: int, number: int, call: str, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._store = store
        self._rank = rank
        self._ranks = ranks
        self._number = number
        self.call = call
        self._next = (rank + 1) % ranks  # which this one watches
        self._engine: xr.Engine | None = None  # ours, until all have begun
        self._watched: tuple[int, xr.Engine, xr.Address] | None = None
        self._said: list[str] = []
        self._signs_given = 0
        self._has_begun = False  # all ranks have
        self._look_at = 0.0
        self._is_known = False  # to all ranks, that it has failed
        self._is_told = False  # by this one

    def __enter__(self) -> Meeting:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, GeneratorExit):
            return
        self.tell(error)
        why = str(error) if self._is_known else self._why(error)
        if isinstance(error, Exception):
            raise CheckpointUpdateFailed(f"{self.call} failed: {why}") from error

    def tell(self, error: BaseException) -> None:
        """Tells the others that this rank has failed, unless they know. Before anything that takes time."""
        if not self._is_known and not self._is_told:
            self._is_told = True
            with suppress(CheckpointUpdateFailed):  # the store's: whoever waits there has lost it too
                self._set(_FAILED, self._why(error))

    def _why(self, error: BaseException) -> str:
        why = str(error) if isinstance(error, CrossrailError) else f"{type(error).__name__}: {error}"
        return f"rank {self._rank}: {why}"

    def exchange(self, stage: str, said: T) -> list[T]:
        """What all ranks have said at this stage, by rank, once all have. Raises CheckpointUpdateFailed."""
        key = self._key(stage, self._rank)
        self._set(key, msgspec.json.encode(said).decode())
        self._said.append(key)
        keys = [self._key(stage, rank) for rank in range(self._ranks)]
        signs = None if self._has_begun else dict[int, bytes]()  # of late ranks at the last look at them
        deadline = time.monotonic() + (_OWN_WORD_S if self._has_begun else self.timeout_s)
        pause_s, longest_s = _PAUSE_S
        while not self._has(keys):
            try:
                self.look()
            except CheckpointUpdateFailed:
                if self._has(keys):  # a rank that is gone by now had nothing more to do
                    break
                raise
            if time.monotonic() > deadline:
                late = [rank for rank in range(self._ranks) if not self._has(keys[rank : rank + 1])]
                before, signs = signs, self._signs(late)
                if before is not None and (silent := [rank for rank in late if signs[rank] == before.get(rank, b"")]):
                    raise CheckpointUpdateFailed(
                        f"nothing arrived from {_named(silent)} for {self.timeout_s:g} s (waiting for {stage})"
                    )
                deadline = time.monotonic() + self.timeout_s
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_s)
        self._raise_of_others()  # a rank that has failed since then had said this before
        with self._told():
            return [msgspec.json.decode(each, type=type(said)) for each in self._store.multi_get(keys)]

    def agree(self, hello: Hello, engine: xr.Engine | None = None) -> list[Hello]:
        """The beginning: all ranks make the same call, and none refuses.

        engine: ours, where ranks have announced theirs: a rank that has died before it made the call is missed at once.
        Raises CheckpointUpdateFailed, which says who does not.
        """
        self._engine = engine if self._ranks > 1 else None
        all_said = self.exchange("begin", hello)
        self._engine = None
        for rank, said in enumerate(all_said):
            if said.call != hello.call:
                raise CheckpointUpdateFailed(
                    f"rank {rank} called {said.call} meanwhile: all ranks must make the same calls"
                )
        if refusals := [f"rank {rank}: {said.refusal}" for rank, said in enumerate(all_said) if said.refusal]:
            self._is_known = True
            raise CheckpointUpdateFailed("; ".join(refusals[:4]))
        self._has_begun = True
        return all_said

    def watch(self, engine: xr.Engine, addresses: list[xr.Address]) -> None:
        """From now on look() notices when the next rank dies; so all ranks together watch everyone. Ranks that our
        engine had given up are tried again: they were frozen or cut off, and have reported that they are alive.
        """
        for address in addresses:
            if engine.peer_state(address) == "lost":
                engine.forget_peer(address)
        if self._next != self._rank:
            engine.connect(addresses[self._next], self.timeout_s)
            self._watched = self._next, engine, addresses[self._next]
            self.sign()

    def _watch_announced(self, engine: xr.Engine) -> None:
        """Watches the next rank before it has begun, if it has announced its engine and that answers."""
        key = _announced(self._next)
        if not self._has([key]):
            return
        with self._told():
            address = xr.Address.from_bytes(self._store.get(key))
        if engine.peer_state(address) == "lost":
            engine.forget_peer(address)
        begins = engine.peer_state(address) == "unknown"
        try:
            engine.connect(address, min(_CONNECT_S, self.timeout_s))
        except WaitTimeout:
            return  # it is frozen, or far: again at the next look
        except CrossrailError as error:
            if begins:  # refused at once
                raise CheckpointUpdateFailed(f"rank {self._next} is gone: {error}") from error
            return  # no answer to the try before, for whatever reason: another one shows
        self._watched = self._next, engine, address

    def sign(self) -> None:
        """A step that may take timeout_s is done: ranks that wait for this one keep waiting."""
        key = self._key("sign", self._rank)
        if not self._signs_given:
            self._said.append(key)
        self._signs_given += 1
        self._set(key, str(self._signs_given))

    def look(self) -> None:
        """Call this while waiting.

        Raises CheckpointUpdateFailed when another rank has failed, or the watched one is gone.
        """
        if (now := time.monotonic()) < self._look_at:
            return
        self._look_at = now + _LOOK_S
        self._raise_of_others()
        if self._engine is not None and self._watched is None:
            self._watch_announced(self._engine)
        if self._watched is not None:
            rank, engine, address = self._watched
            if engine.peer_state(address) == "lost":
                if self._engine is not None:  # it may have been busy loading a checkpoint: a new connection shows
                    self._watched = None
                    return
                raise CheckpointUpdateFailed(
                    f"rank {rank} is gone: {engine.explain(address).note or 'its connection is lost'}"
                )

    def leave(self) -> None:
        """The last of it. The store is rank 0's and ends with it: it stays a moment, until all others have left."""
        if self._rank != 0:
            self._set(self._key("left", self._rank), "")
            return
        keys = [self._key("left", rank) for rank in range(1, self._ranks)]
        deadline = time.monotonic() + _LEAVING_S
        while keys and not self._has(keys) and time.monotonic() < deadline:
            time.sleep(_PAUSE_S[0])

    def forget(self) -> None:
        """Deletes what this rank has said. Call it once all ranks have begun the next call."""
        for key in self._said:
            with suppress(CheckpointUpdateFailed), self._told():
                self._store.delete_key(key)
        self._said.clear()

    def _raise_of_others(self) -> None:
        if self._has([_FAILED]):
            self._is_known = True
            with self._told():
                raise CheckpointUpdateFailed(self._store.get(self._key(_FAILED)).decode())

    def _signs(self, ranks: list[int]) -> dict[int, bytes]:
        with self._told():
            keys = {rank: self._key("sign", rank) for rank in ranks}
            return {rank: self._store.get(key) if self._store.check([key]) else b"" for rank, key in keys.items()}

    def _key(self, stage: str, rank: int | None = None) -> str:
        return f"crossrail/{self._number}/{stage}" + ("" if rank is None else f"/{rank}")

    def _set(self, stage: str, value: str) -> None:
        with self._told():
            self._store.set(stage if stage.startswith("crossrail/") else self._key(stage), value)

    def _has(self, keys: list[str]) -> bool:
        with self._told():
            return bool(self._store.check([key if key.startswith("crossrail/") else self._key(key) for key in keys]))

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Turns the store's exceptions into CheckpointUpdateFailed."""
        try:
            yield
        except CheckpointUpdateFailed:
            raise
        except RuntimeError as error:
            text = str(error).partition("\n")[0]
            raise CheckpointUpdateFailed(
                f"the store at rank 0 does not answer, has it died? {type(error).__name__}: {text}"
            ) from error


def _named(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'' if len(ranks) == 1 else 's'} {shown}"
