"""All worker processes of one side of a run, started and driven in step with those of the other side."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from crossrail._closing import Closing
from crossrail.cli.bench.hosts import wire
from crossrail.cli.bench.hosts.post import Post
from crossrail.cli.child import Child, ChildFailed, Children
from crossrail.errors import UsageError

_MODULE = "crossrail.cli.bench.hosts.worker"
_LOOK_S = 0.01  # between looks: seldom enough to leave the workers their cores
_GRACE_S = 5.0  # beyond a loop's own deadline, for its error to arrive


@dataclass(frozen=True)
class EngineOptions:
    """How a side opens engines. port: the first that tcp rails of workers may listen at, 0: anywhere."""

    transport: str
    rails: int | list[str]
    secret: bytes
    port: int = 0

    @property
    def has_ports(self) -> bool:
        """Whether engines of this transport listen at ports."""
        return self.transport == "auto" or "tcp" in self.transport.split("+")

    @property
    def rail_count(self) -> int:
        """Number of ports that one engine may need."""
        return self.rails if isinstance(self.rails, int) else len(self.rails)

    def of_worker(self, index: int) -> dict[str, Any]:
        """Arguments of Worker.open."""
        port = self.port + index * self.rail_count if self.port and self.has_ports else 0
        if port + self.rail_count > 65536:
            raise UsageError(f"worker {index} has no port left below 65536: bind to a lower one than {self.port - 1}")
        rails: int | Sequence[str] = self.rails
        if self.transport not in ("shm", "tcp"):
            from crossrail.default_rails import default_rails

            rails = default_rails(self.transport, self.rails)
        return {"transport": self.transport, "rails": rails, "port": port, "secret": self.secret.hex()}


class Workers(Closing):
    """A context manager; leaving it ends the processes. Invariant: at most one command is under way."""

    def __init__(self, count: int, cpus: Sequence[int] = ()) -> None:
        """cpus: core of each in turn; none: wherever the kernel likes."""
        self._children: list[Child] = []
        self._all = Children(self._children)
        try:
            for index in range(count):
                cpu = cpus[index % len(cpus)] if cpus else None
                self._children.append(Child(_MODULE, f"worker {index}", cpu=cpu))
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self._children)

    def close(self) -> None:
        """Ends all. Idempotent."""
        self._all.close()

    def open(self, options: EngineOptions, span_bytes: int, polling: str) -> list[wire.Part]:
        """Opens their engines and memory."""
        arguments = [
            {"name": f"bench-{index}", "span_bytes": span_bytes, "polling": polling, **options.of_worker(index)}
            for index in range(len(self))
        ]
        return [wire.Part(**part) for part in self._all.each("open", arguments)]

    def call(self, command: str, timeout_s: float = 60.0, **arguments: Any) -> list[Any]:
        """Makes the same call at all workers, and returns their answers."""
        return self._all.all(command, timeout_s, **arguments)

    def each(self, command: str, arguments: Sequence[dict[str, Any]], timeout_s: float = 60.0) -> list[Any]:
        """Calls each worker with arguments of its own."""
        return self._all.each(command, arguments, timeout_s)

    def call_beside(
        self, post: Post, command: str, arguments: Mapping[str, Any], timeout_s: float, *, awaits_done: bool
    ) -> tuple[list[Any], list[str]]:
        """Like call(), but watches the other side: after it has failed, left or died there is no point in waiting.

        awaits_done: until its Done is there too. Returns what each worker answers, and what Done says.
        """
        deadline = time.monotonic() + timeout_s + _GRACE_S
        for child in self._children:
            child.start(command, **arguments)
        done: wire.Done | None = None
        while True:
            ready = [child.has_answered() for child in self._children]
            for child in self._children:
                child.raise_if_failed()
            if all(ready) and (done is not None or not awaits_done):
                return [child.finish() for child in self._children], [] if done is None else done.answers
            if time.monotonic() > deadline:
                raise ChildFailed(f"{command!r} was not done within {timeout_s:g} s")
            message = post.next(_LOOK_S)
            if isinstance(message, wire.Done) and awaits_done and done is None:
                done = message
            elif message is not None:
                post.raise_if_failed(message)
