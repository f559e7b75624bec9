"""The other side of a test: engines and memory driven by named commands with arguments that travel as messages.

`Node` executes; it lives in this process or in a child (tests.support.peer). `RemoteEngine` and `RemoteMemory` are what
a test holds, and look the same over both. Descriptors and addresses travel as hex.
"""

import hashlib
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

import crossrail as xr
from tests.support import leaks
from tests.support.limits import WAIT_S, eventually
from tests.support.messages import HEADER_BYTES, decoded, encoded
from tests.support.operations import Operations
from tests.support.patterns import CANARY, ByteArray, pattern
from tests.support.scribble import overwrite_homes, scribble
from tests.support.streams import Stream
from tests.support.threads import start_thread


class CommandError(Exception):
    """A command failed on the other side; `kind` is the name of the exception's class there."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind
        self.text = text


class Caller(Protocol):
    """Runs one command of a Node, here or elsewhere."""

    def call(self, command: str, **arguments: Any) -> Any: ...


class Node:
    """Engines, memory, pools and streams under names. Every public method is a command.

    Owner: everything opened here is closed by close_engine or shutdown.
    """

    def __init__(self) -> None:
        self._engines: dict[str, xr.Engine] = {}
        self._regions: dict[int, xr.Region] = {}
        self._backing: dict[int, ByteArray] = {}
        self._owner: dict[int, str] = {}
        self._pools: dict[str, xr.ReceivePool] = {}
        self._events: dict[str, list[xr.EngineEvent]] = {}
        self._streams: dict[int, Stream] = {}
        self._stopping: dict[str, threading.Event] = {}
        self._threads: dict[str, list[threading.Thread]] = {}
        self._next = 0

    def execute(self, command: str, arguments: dict[str, Any]) -> Any:
        method: Callable[..., Any] = getattr(self, command)
        return method(**arguments)

    # --- engines ---
    def open(self, engine: str, **options: Any) -> str:
        self._engines[engine] = xr.Engine(options.pop("name", f"there-{engine}-{os.getpid()}"), **options)
        self._stopping[engine] = threading.Event()
        self._threads[engine] = []
        return self._engines[engine].address.to_bytes().hex()

    def close_engine(self, engine: str) -> None:
        self._stopping.pop(engine).set()
        for thread in self._threads.pop(engine):
            thread.join(WAIT_S)
        self._engines.pop(engine).close()
        self._pools.pop(engine, None)
        for number in [n for n, owner in self._owner.items() if owner == engine]:
            self._forget_memory(number)

    def close_all(self) -> None:
        for stream in self._streams.values():
            stream.stop()
        self._streams.clear()
        for engine in list(self._engines):
            self.close_engine(engine)

    def connect(self, engine: str, peer: str) -> None:
        self._engines[engine].connect(bytes.fromhex(peer), WAIT_S)

    def peer_state(self, engine: str, peer: str) -> str:
        state: str = self._engines[engine].peer_state(bytes.fromhex(peer))
        return state

    def keep_events(self, engine: str) -> None:
        """From now on event_kinds says what happened."""
        kept: list[xr.EngineEvent] = []
        self._events[engine] = kept
        self._engines[engine].on_event(kept.append)

    def event_kinds(self, engine: str) -> list[str]:
        return [event.kind for event in self._events[engine]]

    def progress(self, engine: str) -> int:
        return self._engines[engine].progress()

    def stats(self, engine: str) -> dict[str, int]:
        return dict(self._engines[engine].stats())

    # --- memory ---
    def memory(
        self, engine: str, kind: str, nbytes: int, access: str | None = None, fill: int | None = None
    ) -> dict[str, Any]:
        self._next += 1
        if kind == "mapped":
            region = self._engines[engine].alloc(nbytes)
        else:
            backing = np.empty(nbytes, np.uint8)
            self._backing[self._next] = backing
            region = self._engines[engine].register(backing, access=access)
        self._regions[self._next] = region
        self._owner[self._next] = engine
        self.fill(self._next, fill)
        return {"number": self._next, "descriptor": region.descriptor.to_bytes().hex()}

    def fill(self, number: int, seed: int | None) -> None:
        region = self._regions[number]
        region.array()[:] = CANARY if seed is None else pattern(seed, region.nbytes)

    def content(self, number: int, offset: int, length: int) -> bytes:
        return self._regions[number].array()[offset : offset + length].tobytes()

    def digest(self, number: int) -> str:
        return hashlib.sha256(self._regions[number].array()).hexdigest()

    def close_memory(self, number: int, timeout_s: float = WAIT_S) -> None:
        self._regions[number].close(timeout_s)

    def revoke_memory(self, number: int, timeout_s: float = WAIT_S) -> None:
        self._regions[number].revoke(timeout_s)

    def renew_memory(self, number: int) -> str:
        return self._regions[number].renew().to_bytes().hex()

    # --- counting ---
    def count(self, engine: str, imm: int) -> int:
        return self._engines[engine].imm_counter(imm).poll()

    def wait_count(self, engine: str, imm: int, count: int, timeout_s: float) -> None:
        self._engines[engine].imm_counter(imm).wait(count, timeout_s)

    # --- messages ---
    def receive(self, engine: str, count: int, nbytes: int) -> None:
        self._pools[engine] = self._engines[engine].submit_recvs(count, nbytes)

    def take(self, engine: str, timeout_s: float) -> dict[str, Any]:
        message = self._pools[engine].recv(timeout_s)
        return {"peer": message.peer.to_bytes().hex(), "data": bytes(message.data)}

    def close_pool(self, engine: str) -> None:
        self._pools.pop(engine).close()

    def send(self, engine: str, peer: str, message: bytes) -> None:
        self._engines[engine].submit_send(bytes.fromhex(peer), message).wait(WAIT_S)

    def discard_messages(self, engine: str) -> None:
        """Receives and throws away until the engine closes."""
        pool = self._pools[engine]
        stopping = self._stopping[engine]

        def run() -> None:
            while not stopping.is_set():
                if not pool.poll(64):
                    stopping.wait(0.001)

        self._start(engine, run)

    def echo(self, engine: str, number: int, descriptor: str, imm_in: int, imm_out: int, rounds: int) -> None:
        """Answers each of `rounds` counts of imm_in with a write of memory `number` that carries imm_out."""
        mine = self._engines[engine]
        target = xr.RegionDescriptor.from_bytes(bytes.fromhex(descriptor))
        region = self._regions[number]

        def run() -> None:
            for _ in range(rounds):
                mine.imm_counter(imm_in).wait(1, WAIT_S)
                mine.submit_write(region, target, imm=imm_out).wait(WAIT_S)

        self._start(engine, run)

    # --- operations that start over there ---
    def operate(
        self, engine: str, kind: str, number: int, descriptors: Sequence[str], imm: int | None, page_bytes: int = 4096
    ) -> None:
        operations = self._operations(engine, number, descriptors, imm, page_bytes)
        operations.submit(kind).wait(WAIT_S)

    def stream(
        self, engine: str, kind: str, number: int, descriptors: Sequence[str], imm: int | None, window: int
    ) -> int:
        self._next += 1
        operations = self._operations(engine, number, descriptors, imm, 4096)
        self._streams[self._next] = Stream(operations, kind, window)
        self._streams[self._next].wait_until_flowing()
        return self._next

    def failed_stream(self, stream: int) -> dict[str, Any]:
        """The outcome of a stream that is about to fail: how many operations succeeded, and the error classes of the
        others.
        """
        failing = self._streams[stream]
        eventually(lambda: failing.ended, f"the stream of {failing.kind} ended by a failure")
        return self.stop_stream(stream)

    def stop_stream(self, stream: int) -> dict[str, Any]:
        """Like failed_stream(), for a stream that may have failed by now."""
        outcomes = self._streams.pop(stream).finish()
        failures = [type(outcome).__name__ for outcome in outcomes if outcome is not None]
        return {"done": len(outcomes) - len(failures), "failures": failures}

    # --- the process ---
    def leaks(self) -> dict[str, Any]:
        return {"threads": leaks.crossrail_threads(), "fd_count": len(leaks.open_fds())}

    def overwrite_homes(self) -> int:
        return overwrite_homes()

    def scribble(self, seed: int, for_s: float) -> int:
        """Damages the links of this process. Nothing here can be trusted afterwards."""
        return scribble(seed, for_s)

    def exit_now(self) -> None:
        """Exits like a crash, without any clean-up of Python's or ours."""
        os._exit(1)

    def _forget_memory(self, number: int) -> None:
        self._regions.pop(number)
        self._backing.pop(number, None)
        self._owner.pop(number)

    def _operations(
        self, engine: str, number: int, descriptors: Sequence[str], imm: int | None, page_bytes: int
    ) -> Operations:
        targets = [xr.RegionDescriptor.from_bytes(bytes.fromhex(text)) for text in descriptors]
        return Operations(self._engines[engine], self._regions[number], targets, imm=imm, page_bytes=page_bytes)

    def _start(self, engine: str, run: Callable[[], None]) -> None:
        self._threads[engine].append(start_thread(self._engines[engine], run, f"node-{engine}"))


class LocalNode:
    """A Node in this process, called through the same messages that a child sees."""

    def __init__(self) -> None:
        self._node = Node()

    def call(self, command: str, **arguments: Any) -> Any:
        try:
            return _copied(self._node.execute(command, _copied(arguments)))
        except xr.CrossrailError as error:
            raise CommandError(type(error).__name__, str(error)) from error

    def shutdown(self) -> None:
        self._node.close_all()


def _copied(message: Any) -> Any:
    return decoded(encoded(message)[HEADER_BYTES:])


class RemoteMemory:
    """Memory of the other side, with what a test asks of it."""

    def __init__(self, caller: Caller, number: int, descriptor: xr.RegionDescriptor, nbytes: int) -> None:
        self._caller = caller
        self.number = number
        self.descriptor = descriptor
        self.nbytes = nbytes

    def content(self, offset: int = 0, length: int | None = None) -> ByteArray:
        length = self.nbytes - offset if length is None else length
        content = self._caller.call("content", number=self.number, offset=offset, length=length)
        return np.frombuffer(content, np.uint8)

    def digest(self) -> str:
        """SHA-256 of all of it: for memory too large to send."""
        digest: str = self._caller.call("digest", number=self.number)
        return digest

    def fill(self, seed: int | None = None) -> None:
        self._caller.call("fill", number=self.number, seed=seed)

    def close(self, timeout_s: float = WAIT_S) -> None:
        self._caller.call("close_memory", number=self.number, timeout_s=timeout_s)

    def revoke(self, timeout_s: float = WAIT_S) -> None:
        self._caller.call("revoke_memory", number=self.number, timeout_s=timeout_s)

    def renew(self) -> None:
        text = self._caller.call("renew_memory", number=self.number)
        self.descriptor = xr.RegionDescriptor.from_bytes(bytes.fromhex(text))


class RemoteEngine:
    """An engine of the other side."""

    def __init__(self, caller: Caller, key: str = "main", **options: Any) -> None:
        self.caller = caller
        self.key = key
        self.address = xr.Address.from_bytes(bytes.fromhex(caller.call("open", engine=key, **options)))

    def call(self, command: str, **arguments: Any) -> Any:
        return self.caller.call(command, engine=self.key, **arguments)

    def close(self) -> None:
        self.call("close_engine")

    def memory(
        self, nbytes: int, kind: str = "mapped", *, access: str | None = None, fill: int | None = None
    ) -> RemoteMemory:
        made = self.call("memory", kind=kind, nbytes=nbytes, access=access, fill=fill)
        descriptor = xr.RegionDescriptor.from_bytes(bytes.fromhex(made["descriptor"]))
        return RemoteMemory(self.caller, made["number"], descriptor, nbytes)

    def count(self, imm: int) -> int:
        count: int = self.call("count", imm=imm)
        return count

    def wait_count(self, imm: int, count: int = 1, timeout_s: float = WAIT_S) -> None:
        self.call("wait_count", imm=imm, count=count, timeout_s=timeout_s)

    def expect_count(self, imm: int, count: int) -> None:
        """Exactly `count` arrive: that many, and then no more. Consumes them."""
        self.wait_count(imm, count)
        assert self.count(imm) == 0, f"more than {count} arrived for immediate {imm}"

    def receive(self, count: int, nbytes: int) -> None:
        self.call("receive", count=count, nbytes=nbytes)

    def take(self, timeout_s: float = WAIT_S) -> tuple[xr.Address, bytes]:
        message = self.call("take", timeout_s=timeout_s)
        return xr.Address.from_bytes(bytes.fromhex(message["peer"])), message["data"]

    def send(self, peer: xr.Address, message: bytes) -> None:
        self.call("send", peer=peer.to_bytes().hex(), message=message)

    def operate(self, kind: str, memory: RemoteMemory, targets: Sequence[xr.RegionDescriptor], **how: Any) -> None:
        """One operation of `kind` that the other side starts, waited for."""
        texts = [target.to_bytes().hex() for target in targets]
        self.call("operate", kind=kind, number=memory.number, descriptors=texts, **({"imm": None} | how))

    def stream(
        self,
        kind: str,
        memory: RemoteMemory,
        targets: Sequence[xr.RegionDescriptor],
        imm: int | None = None,
        window: int = 8,
    ) -> int:
        texts = [target.to_bytes().hex() for target in targets]
        stream: int = self.call("stream", kind=kind, number=memory.number, descriptors=texts, imm=imm, window=window)
        return stream

    def peer_state(self, peer: xr.Address) -> str:
        state: str = self.call("peer_state", peer=peer.to_bytes().hex())
        return state

    def wait_for_count_of(self, imm: int, count: int) -> None:
        """Waits until there are `count`, without consuming them."""
        eventually(lambda: self.count(imm) >= count, f"{count} counts of immediate {imm}")
