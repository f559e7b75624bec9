"""Memory that runs out within a call: a MemoryError, after which everything else goes on, and nothing stays locked."""

import os
import subprocess
import sys
import textwrap

import pytest

from tests.support.fake_gpu import driver_file
from tests.support.limits import PROGRAM_S
from tests.support.process import REPOSITORY, assert_clean

# One piece of memory after the other is refused, of those that `act` asks for on this thread, until it needs fewer.
EACH = """
    import asyncio, ctypes, gc, os, queue, sys
    import numpy as np
    import crossrail as xr

    fail_malloc_at = ctypes.CDLL(sys.argv[1]).fail_malloc_at

    def refuse_each(act, check):
        refused = 0
        while True:
            fail_malloc_at(refused + 1)
            try:
                act()
            except MemoryError as error:
                assert str(error) in ("", "no memory left for this call of crossrail"), error
            left = fail_malloc_at(0)
            check()
            if left:
                return refused
            refused += 1

    # On engines that spin nobody but the worker moves data, for which memory must not run out.
    options = {"polling": "spin", "transport": sys.argv[2], "rails": 1 if sys.argv[2] == "shm" else ["127.0.0.1"]}

    def descriptors():
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    with xr.Engine("first", **options):
        pass  # from here on the package has what it keeps
    before = descriptors()
    with xr.Engine("a", **options) as a, xr.Engine("b", **options) as b:
        source = a.register(np.full(100, 7, np.uint8))
        grown = [b.alloc(100) for _ in range(64)]  # so are now the binding's own tables, which cannot fail
        del grown
"""

ALLOC = """
        held = []

        def alloc():
            held.append(b.alloc(100))

        def check():
            with b.alloc(100) as target:
                a.submit_write(source, target.descriptor).wait(10)
                assert bytes(memoryview(target)) == bytes([7]) * 100

        print(refuse_each(alloc, check))
"""

WRITE = """
        targets = [b.alloc(100)]
        held = []  # so that each write needs a transfer of its own

        def write():
            held.append(a.submit_write(source, targets[-1].descriptor))

        def check():
            targets.append(b.alloc(100))  # what is known of the last one stays as it is
            write()
            held[-1].wait(10)
            assert bytes(memoryview(targets[-1])) == bytes([7]) * 100
            targets.append(b.alloc(100))

        print(refuse_each(write, check))
        b.close()
        a.forget_peer(b.address)  # goes through all that is known of it
    del a, b, source, targets, held, write, check
    assert descriptors() == before  # a transfer that could not be made keeps no engine alive
"""

COUNT = """
        counter = b.imm_counter(7)
        told = xr._core.Notifier()
        counter._notify(1, told, 0)

        def check():
            counter._give_back(0)  # whoever waits is looked at again
            assert len(told.drain()) == 1 and counter.poll() == 0
            counter._notify(1, told, 0)

        print(refuse_each(lambda: counter._give_back(1), check))
"""

ASK = """
        counter = b.imm_counter(7)
        told = xr._core.Notifier()
        counter._give_back(1)

        def check():  # a call that failed takes no counts, now or later
            assert counter.poll() == 1 - len(told.drain())
            counter._give_back(1)
            assert len(told.drain()) == 0
            counter.wait(counter.poll(), 10)
            counter._give_back(1)

        print(refuse_each(lambda: counter._notify(1, told, 0), check))
"""

CLOSE = """
        regions = [b.alloc(100) for _ in range(200)]

        print(refuse_each(regions.clear, lambda: None))
"""

WATCHER = """
        kept = []
        added = queue.Queue()

        def watch():
            kept.append(b.alloc_watcher(lambda old, new: added.put(new)))

        def check():
            with b.alloc_watcher(lambda old, new: added.put(new)) as another:
                another.add(5)
                assert added.get(timeout=10) == 5

        refused = refuse_each(watch, check)
        more = [b.alloc_watcher(print) for _ in range(512 - len(kept))]  # all that there may be: none was lost
        print(refused)
"""

AWAIT = """
        target = b.alloc(100)
        loop = asyncio.new_event_loop()
        loop.set_exception_handler(lambda loop, context: None)  # tells of a MemoryError between tasks

        async def written():
            await a.submit_write(source, target.descriptor)

        print(refuse_each(lambda: loop.run_until_complete(asyncio.wait_for(written(), 10)), lambda: None))
"""

OPEN = """
        opened = []

        def open_one():
            opened.append(xr.Engine("c", **options))

        def close_all():
            while opened:
                opened.pop().close()

        print(refuse_each(open_one, close_all))
        open_one()
        close_all()
    del a, b, source
    assert descriptors() == before  # of what an engine had opened nothing is left
"""

DUMP = "        print(refuse_each(lambda: a.dump(), lambda: a.dump()))"

LOOK = """
        with b.alloc(100) as target:
            a.submit_write(source, target.descriptor).wait(10)
        print(refuse_each(lambda: (a.explain(b.address), a._traffic(1.0)), lambda: a.explain(b.address)))
"""


def refused_each(act: str, transport: str) -> int:
    library = driver_file().parents[1] / "memory" / "libfailing_malloc.so"
    script = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", textwrap.dedent(EACH + act), str(library), transport],
        capture_output=True,
        text=True,
        timeout=PROGRAM_S,
        cwd=REPOSITORY,
        env=os.environ | {"LD_PRELOAD": str(library)},
    )
    assert_clean(script)
    return int(script.stdout)


@pytest.mark.no_sanitizer  # whose memory is not malloc's
@pytest.mark.parametrize(
    ("act", "transport", "least"),
    [
        (ALLOC, "shm", 5),
        (WRITE, "shm", 3),
        (WATCHER, "shm", 1),
        (COUNT, "shm", 1),
        (ASK, "shm", 1),
        (CLOSE, "tcp", 0),
        (AWAIT, "shm", 1),
        (AWAIT, "tcp", 1),
        (OPEN, "shm", 50),
        (OPEN, "tcp", 50),
        (DUMP, "shm", 1),
        (LOOK, "shm", 3),
        (LOOK, "tcp", 3),
    ],
    ids=[
        "alloc",
        "write",
        "watch",
        "count",
        "ask",
        "close",
        "await-shm",
        "await-tcp",
        "open-shm",
        "open-tcp",
        "dump",
        "look-shm",
        "look-tcp",
    ],
)
def test_call_without_memory_for_it_leaves_everything_else_as_it_was(act: str, transport: str, least: int) -> None:
    assert refused_each(act, transport) >= least
