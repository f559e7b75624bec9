"""Scenarios of somebody's own, for `crossrail sim --scenario tests.sim.own_scenarios:NAME`."""

import os
import signal
import time

from crossrail.sim.scenarios import Run

calls = 0


async def odd(run: Run) -> None:
    """Fails with odd seeds.

    And says so.
    """
    run.check.that(run.world.seed % 2 == 0, "the seed is odd")


async def named_in_words(run: Run) -> None:
    run.check.that(False, run.host("a").engine("decoder 0").name)


async def differs(run: Run) -> None:
    global calls
    calls += 1
    run.check.that(True, "")
    run.host(f"host{calls}").engine("engine")


async def crashes(run: Run) -> None:
    run.check.that(True, "")
    if run.world.seed == 3:
        os.kill(os.getpid(), signal.SIGABRT)


async def talks(run: Run) -> None:
    run.check.that(True, "")
    print("says something")


async def named_abroad(run: Run) -> None:
    run.check.that(True, "")
    run.host("h\N{LATIN SMALL LETTER O WITH CIRCUMFLEX}te").engine("engine")


async def takes_long(run: Run) -> None:
    run.check.that(True, "")
    os.write(1, b"begun\n")  # in one piece, whatever PYTHONUNBUFFERED says: two processes have this one output
    time.sleep(60)  # noqa: ASYNC251  # of real time, in which it hears of nothing


def no_coroutine(run: Run) -> None:
    pass
