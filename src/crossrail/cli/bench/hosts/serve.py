"""`crossrail bench serve`: the other side of `crossrail bench run`. Serves one run after another until it is ended."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console

import crossrail as xr
from crossrail._options import SECRET_VARIABLE
from crossrail._text import plain
from crossrail.cli.background import background_console
from crossrail.cli.bench.hosts import wire
from crossrail.cli.bench.hosts.places import DEFAULT_PORT, MeetingThread, bind_place, is_loopback, loopback_rails
from crossrail.cli.bench.hosts.post import LOOK_S, MESSAGES_HELD, Post
from crossrail.cli.bench.hosts.workers import EngineOptions, Workers
from crossrail.cli.bench.machine import machine
from crossrail.cli.option_types import IntRange, cpu_list, size
from crossrail.cli.option_types import rails as rails_type
from crossrail.cli.service import name_of_host, rails_behind, records_on_signal, secret_of, transport_option
from crossrail.cli.text import format_bytes, format_count
from crossrail.errors import CrossrailError, UsageError, WaitTimeout

_MEET_S = 60.0
_IDLE_S = 120.0


@dataclass(frozen=True)
class Limits:
    """What one run may use of this side."""

    processes_max: int
    memory_bytes_max: int

    def check(self, hello: wire.Hello) -> None:
        """UsageError, for the other side to read, when it wants more."""
        if hello.processes > self.processes_max:
            raise UsageError(
                f"{hello.processes} processes were asked for, and at most {self.processes_max} are given here"
            )
        if (total := hello.processes * hello.span_bytes) > self.memory_bytes_max:
            raise UsageError(
                f"{format_bytes(total)} of memory were asked for, and at most {format_bytes(self.memory_bytes_max)} "
                "are given here (--memory-max)"
            )


class RunOver(Exception):
    """The other side said Bye."""


class Server:
    """Takes one run after another. Threads: the one that calls serve()."""

    def __init__(
        self,
        engine: xr.Engine,
        pool: xr.ReceivePool,
        options: EngineOptions,
        limits: Limits,
        cpus: list[int],
        console: Console,
    ) -> None:
        """The parts, all open; the caller closes them. options: of workers' engines."""
        self._engine = engine
        self._pool = pool
        self._options = options
        self._limits = limits
        self._cpus = cpus
        self._console = console

    def serve(self, *, once: bool) -> bool:
        """Serves until interrupted, or with `once` until the first run is over. Returns whether that run ended well."""
        while True:
            try:
                received = self._pool.recv(LOOK_S)
            except WaitTimeout:
                continue
            hello = self._hello(received)
            if hello is None:
                continue
            ended_well = self._run(received.peer, hello)
            if once:
                return ended_well

    def _hello(self, received: xr.Message) -> wire.Hello | None:
        """The message that begins a run; anything else is refused or ignored."""
        try:
            message = wire.decode(received.data)
        except wire.OtherVersion as other:
            reason = f"this side speaks version {wire.VERSION} of the benchmark's protocol, you {other.theirs}"
            self._refuse(received.peer, 0, reason)
            self._say("refused", received.peer, str(other))
            return None
        except wire.ProtocolError as error:
            self._say("ignored", received.peer, str(error))
            return None
        if isinstance(message, wire.Hello):
            return message
        return None  # the rest of a run that is over

    def _refuse(self, peer: xr.Address, run: int, reason: str) -> None:
        self._post(peer, run).try_send(wire.Refusal(run=run, reason=reason))

    def _on_stranger(self, received: xr.Message) -> None:
        """Answers a stranger in the middle of another's run."""
        hello = self._hello(received)
        if hello is not None:
            self._refuse(received.peer, hello.run, "another run is under way; try again later")

    def _post(self, peer: xr.Address, run: int) -> Post:
        return Post(self._engine, self._pool, peer, run, f"the run {peer.name!r}", self._on_stranger)

    def _run(self, peer: xr.Address, hello: wire.Hello) -> bool:
        """Serves one run. Never raises for what the other side does."""
        post = self._post(peer, hello.run)
        try:
            self._limits.check(hello)
        except UsageError as error:
            self._refuse(peer, hello.run, str(error))
            self._say("refused", peer, str(error))
            return False
        self._say("run", peer, f"{format_count(hello.processes, 'worker')} with {format_bytes(hello.span_bytes)} each")
        begun, session = time.monotonic(), _Session(post, self._options, self._cpus)
        try:
            session.run(hello)
        except RunOver:
            self._say("done", peer, f"{format_count(session.steps, 'step')} in {time.monotonic() - begun:.1f} s")
            return True
        except (CrossrailError, OSError, MemoryError) as error:
            self._say("dropped", peer, str(error))
            post.try_send(wire.Failed(run=hello.run, reason=str(error)[:4000]))
        return False

    def _say(self, what: str, peer: xr.Address, about: str) -> None:
        text = f"{what} {peer.name} (pid {peer.pid}): {about}"
        self._console.print(plain(text), markup=False, soft_wrap=True)


class _Session:
    """The workers of one run, and the commands for them."""

    def __init__(self, post: Post, options: EngineOptions, cpus: list[int]) -> None:
        self._post = post
        self._options = options
        self._cpus = cpus
        self.steps = 0

    def run(self, hello: wire.Hello) -> None:
        """Raises RunOver at the end, or CrossrailError."""
        run, post = hello.run, self._post
        with Workers(hello.processes, self._cpus) as workers:
            parts = workers.open(self._options, hello.span_bytes, hello.polling)
            cores = len(os.sched_getaffinity(0))
            post.send(wire.Welcome(run=run, crossrail=xr.__version__, machine=machine(), cores=cores, parts=parts))
            meet = post.receive(wire.Meet, _MEET_S)
            if len(meet.parts) != len(workers):
                raise wire.ProtocolError(f"{len(meet.parts)} workers are to meet {len(workers)}")
            arguments = [
                {"address": part.address, "memory": part.memory, "control": part.control} for part in meet.parts
            ]
            workers.each("meet", arguments)
            post.send(wire.Met(run=run))
            while True:
                step = self._next_step()
                answers = self._work(workers, step, hello.span_bytes)
                self.steps += 1
                post.send(wire.Done(run=run, answers=["" if answer is None else str(answer) for answer in answers]))

    def _next_step(self) -> wire.Step:
        deadline = time.monotonic() + _IDLE_S
        while (left_s := deadline - time.monotonic()) > 0:
            message = self._post.next(left_s)
            if isinstance(message, wire.Bye):
                raise RunOver
            if isinstance(message, wire.Step):
                return message
            if message is not None:
                self._post.raise_if_failed(message)
        raise CrossrailError(f"nothing came for {_IDLE_S:g} s")

    def _work(self, workers: Workers, step: wire.Step, span_bytes: int) -> list[Any]:
        if step.nbytes > span_bytes:
            raise wire.ProtocolError(f"nbytes is {step.nbytes}, and each worker has {span_bytes}")
        command, arguments = _COMMANDS[step.what](step, span_bytes)
        answers, _ = workers.call_beside(self._post, command, arguments, step.timeout_s, awaits_done=False)
        return answers if step.what in ("digest", "fill", "listen") else [None] * len(answers)


# By a step's `what`: the method of Worker to call, and its arguments.
_COMMANDS: dict[str, Any] = {
    "receive": lambda step, _: ("receive", {"count": step.count, "timeout_s": step.timeout_s}),
    "ping-pong": lambda step, _: (
        "ping_pong",
        {
            "nbytes": step.nbytes,
            "count": step.count,
            "verify": step.verify,
            "timeout_s": step.timeout_s,
            "first": False,
        },
    ),
    "clear": lambda step, _: ("clear", {"nbytes": step.nbytes}),
    "digest": lambda step, _: ("digest", {"nbytes": step.nbytes}),
    "fill": lambda step, _: ("fill", {"nbytes": step.nbytes, "seed": step.count}),
    "listen": lambda step, _: ("listen", {"timeout_s": step.timeout_s}),
    "stream": lambda step, span: (
        "stream",
        {
            "nbytes": step.nbytes,
            "window": step.window,
            "count": step.count,
            "sender": False,
            "spin": step.spin,
            "span_bytes": span,
            "timeout_s": step.timeout_s,
        },
    ),
}


def _announce(console: Console, host: str, port: int, secret: bytes, drawn: bool, engine: xr.Engine) -> None:
    """Prints what to type on the other side."""
    name = name_of_host(host, engine)
    setting = f"{SECRET_VARIABLE}={secret.decode()} " if drawn else ""
    for line in (
        "ready to measure. On the other host, or in another shell:",
        f"    {setting}crossrail bench run {name}:{port}",
    ):
        console.print(line, markup=False, soft_wrap=True)
    click.echo("Ctrl-C ends it.", err=True)


def _open_engine(options: EngineOptions, listen: int, port: int) -> xr.Engine:
    with rails_behind("--bind", listen):
        return xr.Engine(
            "bench-serve",
            transport=options.transport,
            rails=options.rails,
            port=port,
            secret=options.secret,
            message_bytes_max=wire.MESSAGE_BYTES_MAX,
        )


@contextlib.contextmanager
def _orderly_end() -> Iterator[None]:
    """SIGTERM ends the command as if everything was finished: everything is closed, the status is 0."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@click.command("serve")
@click.option(
    "--bind",
    type=bind_place,
    default=f":{DEFAULT_PORT}",
    show_default=True,
    metavar="[HOST]:PORT",
    help="Address to listen on; port 0: any. TCP rails use the ports after it.",
)
@transport_option()
@click.option("--rails", type=rails_type, help="Rails of each engine, or their interfaces [default: 1].")
@click.option(
    "--secret-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help=f"File with the secret [default: {SECRET_VARIABLE}, or one that is drawn and printed].",
)
@click.option("--cpus", type=cpu_list, default="", metavar="A,B,...", help="Cores of the workers, assigned in turn.")
@click.option(
    "--processes-max",
    type=IntRange(1, wire.PROCESSES_MAX),
    default=16,
    show_default=True,
    help="Maximum number of workers of a run.",
)
@click.option(
    "--memory-max",
    type=size(1 << 20, 1 << 44),
    default="4G",
    show_default=True,
    help="Maximum memory of all workers of a run.",
)
@click.option("--once", is_flag=True, help="Exit after one run, with code 1 if it failed.")
@records_on_signal()
def serve_command(
    bind: tuple[str, int],
    transport: str,
    rails: int | list[str] | None,
    secret_file: Path | None,
    cpus: list[int],
    processes_max: int,
    memory_max: int,
    once: bool,
) -> None:
    """Run the other side of `crossrail bench run HOST:PORT`, for one run after another.

    Anyone who knows the secret can start workers here, which use memory and cores while the run lasts.
    """
    host, port = bind
    secret = secret_of(secret_file)
    drawn = not secret
    if drawn:
        secret = secrets.token_hex(16).encode()
    if rails is None:
        rails = loopback_rails(host) if is_loopback(host) and transport != "shm" else 1
    # The engine that talks listens right behind the port for questions, workers' engines behind that.
    options = EngineOptions(transport, rails, secret, port + 1 if port else 0)
    own, behind = (options.of_worker(index)["port"] for index in (0, 1))
    with (
        _orderly_end(),
        background_console() as console,
        _open_engine(options, port, own) as engine,
        engine.submit_recvs(MESSAGES_HELD, wire.MESSAGE_BYTES_MAX) as pool,
        MeetingThread(host, port, secret, engine.address) as meeting,
    ):
        _announce(console, host, meeting.port, secret, drawn, engine)
        server = Server(engine, pool, replace(options, port=behind), Limits(processes_max, memory_max), cpus, console)
        if not server.serve(once=once):
            raise click.exceptions.Exit(1)
