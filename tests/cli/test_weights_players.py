"""Processes of a fleet, whatever moment it is ended in."""

import pytest

from tests.support.process import run_script


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
