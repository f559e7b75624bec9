"""Runs of `crossrail sim` in processes of their own: several at once, so that a crash takes no other run with it."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Generator, Iterable, Iterator
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import NamedTuple

from crossrail.sim.scenarios import Outcome, find, play

_CONTEXT = multiprocessing.get_context("spawn")  # a fork would copy what the progress bar's thread holds
_END_PATIENCE_S = 5.0


class Task(NamedTuple):
    """One run. twice: run it once more; the event logs must be equal. keep_log: as for World."""

    scenario: str
    seed: int
    twice: bool
    keep_log: bool | int = False

    def play(self) -> Outcome:
        """Runs it in this process."""
        scenario = find(self.scenario)[0]
        outcome = play(scenario, self.seed, keep_log=self.keep_log)
        if self.twice:
            outcome.compare(play(scenario, self.seed))
        return outcome


class _Player:
    """A process that plays one task after another."""

    def __init__(self, *, shows_crash: bool = False) -> None:
        self.task: Task | None = None
        self._took = False  # as far as we know
        self.connection, theirs = _CONTEXT.Pipe()
        self._process = _CONTEXT.Process(target=_serve, args=(theirs, shows_crash), daemon=True)
        # Ctrl-C goes to all of the terminal: it waits until _serve says that it is ours alone. The tracker of
        # multiprocessing, which the first start of a process starts, would unblock SIGINT.
        resource_tracker.ensure_running()
        held = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        self._process.start()
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
        theirs.close()  # ours of it: when the process ends, reading ends too

    def give(self, task: Task) -> None:
        """Also accepted if the process is dead by now: take() then reports it."""
        self.task = task
        self._took = True
        try:
            self.connection.send(task)
        except OSError:
            self._took = False

    def take(self) -> Outcome:
        """The outcome of its task. If the process has died, the run counts as failed, and the player ends."""
        assert self.task is not None
        task, self.task = self.task, None
        try:
            outcome = self.connection.recv()
        except EOFError:
            pass
        except OSError:  # it died with the task unread
            self._took = False
        else:
            assert isinstance(outcome, Outcome)
            return outcome
        self._process.join(_END_PATIENCE_S)
        ending = f"its process {_ending(self._process.exitcode)}"
        why = "" if self._took else " before it began: by what an earlier run in it, or its start, had left behind"
        return Outcome(task.scenario, task.seed, failures=[ending + why])

    @property
    def is_alive(self) -> bool:
        return self._process.exitcode is None

    def stop(self) -> None:
        self._process.kill()
        self._process.join(_END_PATIENCE_S)
        self.connection.close()


def play_each(tasks: Iterable[Task], jobs: int, *, shows_crash: bool = False) -> Generator[Outcome, None, None]:
    """The outcomes, in the order in which runs end. Blocks. Closing it ends the processes.

    shows_crash: a process that crashes says on standard error where.
    """
    left = iter(tasks)
    players = [_Player(shows_crash=shows_crash) for _ in range(jobs)]
    try:
        for player in players:
            _give_next(player, left)
        while any(player.task is not None for player in players):
            ready = wait([player.connection for player in players if player.task is not None])
            for index, player in enumerate(players):
                if player.connection not in ready:
                    continue
                yield player.take()
                if not player.is_alive:
                    player.stop()
                    players[index] = player = _Player(shows_crash=shows_crash)
                _give_next(player, left)
    finally:
        for player in players:
            player.stop()


def _give_next(player: _Player, left: Iterator[Task]) -> None:
    task = next(left, None)
    if task is not None:
        player.give(task)


def play_one(task: Task) -> Outcome:
    """The outcome of one run, also if its process crashes: it says where. Blocks."""
    with contextlib.closing(play_each([task], 1, shows_crash=True)) as played:
        return next(played)


def _serve(connection: Connection, shows_crash: bool) -> None:
    if shows_crash:  # a run that is played alone: one may look into it
        with contextlib.suppress(RuntimeError, ValueError, OSError):  # without standard error
            faulthandler.enable()
        with contextlib.suppress(OSError):  # multiprocessing has put /dev/null in its place
            sys.stdin = open(0, closefd=False)  # noqa: SIM115
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who started us ends us
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    logging.getLogger("crossrail").setLevel(logging.ERROR)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    while True:
        try:
            task = connection.recv()
        except (EOFError, OSError):
            return
        outcome = task.play()
        for stream in (sys.stdout, sys.stderr):  # we are killed in the end
            if stream is not None:
                with contextlib.suppress(OSError, ValueError):
                    stream.flush()
        with contextlib.suppress(OSError):  # nobody is left to hear it
            connection.send(outcome)


def _end_with_parent() -> None:
    """A killed parent cannot end its children, and a run may take hours that nobody will hear of."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _ending(exitcode: int | None) -> str:
    if exitcode is None:
        return "closed its pipe and continues"
    return f"was ended by {signal.Signals(-exitcode).name}" if exitcode < 0 else f"ended with status {exitcode}"
