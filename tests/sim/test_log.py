"""The event log of a world: all of it, the last of it, or its digest alone."""

import asyncio

import pytest

import crossrail as xr
from crossrail import sim
from tests.support.process import assert_clean, run_script


def log_and_digest(keep_log: bool | int, seed: int = 1) -> tuple[list[str], str]:
    with sim.World(seed=seed, keep_log=keep_log) as world:
        a, b = (world.host(name).engine(name) for name in "ab")
        source, target = a.alloc(4096), b.alloc(4096)
        for _ in range(20):
            a.submit_write(source, target.descriptor, imm=1).wait(timeout_s=1)
        return world.log, world.log_digest


def test_every_event_is_a_line_in_the_order_of_the_clock() -> None:
    lines, _ = log_and_digest(True)

    times = [int(line.split()[0]) for line in lines]
    assert times == sorted(times)
    for word in ("engine-open", "connect", "post", "land", "count", "done"):
        assert any(line.split()[2] == word for line in lines), word


@pytest.mark.parametrize("count", [1, 10, 1_000_000])
def test_a_number_keeps_the_last_so_many_lines(count: int) -> None:
    assert log_and_digest(count)[0] == log_and_digest(True)[0][-count:]


def test_the_digest_is_of_everything_kept_or_not() -> None:
    digests = {log_and_digest(keep_log)[1] for keep_log in (True, False, 0, 7)}

    assert len(digests) == 1
    assert log_and_digest(False) == ([], digests.pop())
    assert log_and_digest(True, seed=2)[1] != log_and_digest(True, seed=1)[1]


async def sleeps_over_much_work(world: sim.World) -> tuple[int, str]:
    """In each sleep the world goes on for longer than the loop stays in it at a time; and an engine watches a word."""
    a, b, watching = (world.host(name).engine(name, submit_queue_depth=65536, recorder_entries=0) for name in "abc")
    watcher = watching.alloc_watcher(lambda old, new: None)
    source, target = a.register_phantom(1 << 30), b.register_phantom(1 << 30)
    a.connect(b.address)
    for turn in range(7):
        transfers = [a.submit_write(source, target.descriptor, 1 << 18) for _ in range(50_000)]
        await asyncio.sleep(0.1 * turn)
        await transfers[-1]
    watcher.close()
    return world.now_ns, world.log_digest


def test_how_fast_the_machine_is_decides_nothing() -> None:
    assert len({sim.run(sleeps_over_much_work, seed=5) for _ in range(4)}) == 1


UNNAMED = """
    import crossrail as xr
    from crossrail import sim
    with sim.World(5) as world:
        a, b = world.host("a").engine(), xr.Engine(transport="sim")
        source, target = a.alloc(4096), b.alloc(4096)
        a.submit_write(source, target.descriptor).wait()
        print(a.name, b.name, world.log_digest)
"""


def test_unnamed_engines_are_the_same_in_every_process() -> None:
    first, second = run_script(UNNAMED), run_script(UNNAMED)

    assert_clean(first)
    assert first.stdout.startswith("engine1 engine2 ") and first.stdout == second.stdout


def test_names_of_engines_are_one_word_each() -> None:
    with sim.World(1, keep_log=True) as world:
        world.host("a").engine("decoder 0\n50%\x7f\u00e9")

        assert world.log == ["0 a engine-open engine=decoder%200%0A50%25%7F\u00e9"]


def test_fault_before_there_is_a_host() -> None:
    with sim.World(1, keep_log=True) as world:
        world.lose_datagrams(0.1)

        assert world.log == ["0 - fault kind=datagram-loss value=100000"]


def test_a_negative_number_of_lines_is_refused() -> None:
    with pytest.raises(xr.UsageError, match="keep_log"):
        sim.World(keep_log=-1)
