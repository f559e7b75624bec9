"""Processes of a fleet, whatever moment it is ended in."""

from pathlib import Path

import pytest

from tests.support.limits import WAIT_S, eventually
from tests.support.process import run_script, start_script


@pytest.mark.parametrize("turns", [1, 2, 5])
def test_processes_that_are_just_being_started_end_with_the_others(turns: int) -> None:
    script = run_script(
        f"""
    import asyncio, contextlib, os
    from pathlib import Path
    from crossrail.cli.weights.players import Players

    class Sleeper:
        def __init__(self, rank):
            self.name = f"sleeper-{{rank}}"
        def command(self):
            return ["-c", "import sys; sys.stdin.read()"]

    async def play():
        players = Players("secret")
        starting = asyncio.gather(*(players.start(Sleeper(rank)) for rank in range(4)))
        for _ in range({turns}):
            await asyncio.sleep(0)
        starting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await starting
        await players.close()
        return Path(f"/proc/self/task/{{os.getpid()}}/children").read_text()

    print("left:", asyncio.run(play()))
    """,
        timeout_s=60,
    )

    assert (script.returncode, script.stdout.split(), script.stderr) == (0, ["left:"], "")


def test_a_process_ends_with_its_parent_also_in_the_middle_of_a_computation() -> None:
    """By SIGTERM, as a scheduler ends a job: nobody closes anything."""
    child = (
        "import sys; from crossrail._parent import end_with_parent; end_with_parent(); print(1, flush=True)\nwhile 1: 1"
    )
    script = f"""
        import subprocess, sys
        command = [sys.executable, "-c", {child!r}]
        with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as child:
            child.stdout.readline()
            print(child.pid, flush=True)
            child.wait()
    """
    with start_script(script) as parent:
        assert parent.stdout is not None
        status = Path(f"/proc/{int(parent.stdout.readline())}/status")
        assert "State:\tZ" not in status.read_text()
        parent.terminate()
        parent.wait(WAIT_S)
        eventually(lambda: _is_gone(status), "the child has ended")


def _is_gone(status: Path) -> bool:
    try:
        return "State:\tZ" in status.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
