"""Messages whose receiver has no place for them yet, on links that come and go."""

from __future__ import annotations

import asyncio

import pytest

import crossrail as xr
from crossrail import sim

KIB = 1 << 10


class Waiting:
    """Two engines that know each other, and 1.2 MiB of messages that wait with b, which has no pool for them."""

    def __init__(self, world: sim.World) -> None:
        self.world = world
        self.a, self.b = (world.host(name, "cx7").engine(name) for name in "ab")
        self.a.connect(self.b.address)
        self.b.connect(self.a.address)  # a's forgetting b ends no session: b has a link, too
        self.send(bytes(60 * KIB), 20)
        world.run(0.5)

    def send(self, message: bytes, times: int = 1) -> list[xr.Transfer]:
        return [self.a.submit_send(self.b.address, message) for _ in range(times)]

    def take(self, times: int) -> list[bytes]:
        with self.b.submit_recvs(64, 256 * KIB) as pool:
            return [pool.recv(5).data for _ in range(times)]


def test_messages_of_a_forgotten_link_take_no_room_from_those_of_the_next() -> None:
    with sim.World(3) as world:
        waiting = Waiting(world)

        waiting.a.forget_peer(waiting.b.address)
        sent = waiting.send(b"x" * 60 * KIB, 20)
        world.run(2)

        assert waiting.take(20) == [b"x" * 60 * KIB] * 20
        for transfer in sent:
            transfer.wait(5)


@pytest.mark.parametrize("seed", range(3))
def test_empty_messages_behind_a_full_window_arrive_once(seed: int) -> None:
    with sim.World(seed) as world:
        waiting = Waiting(world)

        waiting.a.forget_peer(waiting.b.address)
        sent = waiting.send(bytes(60 * KIB), 30) + waiting.send(b"", 30)
        world.run(2)

        assert sorted(map(len, waiting.take(60))) == [0] * 30 + [60 * KIB] * 30
        for transfer in sent:
            transfer.wait(5)


def test_who_of_many_tasks_takes_a_message_is_the_same_in_each_run() -> None:
    async def main(world: sim.World) -> list[int]:
        a, b = (world.host(name).engine(name) for name in "ab")
        served: list[int] = []
        with b.submit_recvs(16, 64) as pool:

            async def take(taker: int) -> None:
                await pool.recv_async()
                served.append(taker)

            takers = [asyncio.create_task(take(taker)) for taker in range(8)]
            await asyncio.sleep(0.01)
            for _ in takers:
                await a.submit_send(b.address, b"to whoever has waited longest")
            await asyncio.gather(*takers)
        return served

    assert sim.run(main, seed=5) == list(range(8))
