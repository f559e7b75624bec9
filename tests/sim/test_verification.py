"""Checked operations when peers come and go: each is counted once, and its answer heard, whatever gets lost."""

import numpy as np
import pytest

import crossrail as xr
from crossrail import sim
from tests.support.patterns import pattern

NBYTES = 50_000


class Two:
    """A writer, and an owner of memory, who may forget each other."""

    def __init__(self, world: sim.World) -> None:
        self.world = world
        self.hosts = [world.host(name, nic="2xplain") for name in ("writer", "owner")]
        self.writer, self.owner = (host.engine(peer_timeout_s=3.0) for host in self.hosts)
        self.source = self.writer.register(pattern(3, NBYTES))
        self.target = self.owner.register(np.zeros(NBYTES, np.uint8))

    def write(self) -> xr.Transfer:
        return self.writer.submit_write(self.source, self.target.descriptor, imm=1, verify=True)


@pytest.mark.parametrize("moment_us", range(2, 40, 2))
def test_who_is_forgotten_before_the_answer_gets_it_and_is_counted_once(moment_us: int) -> None:
    with sim.World(seed=moment_us) as world:
        two = Two(world)
        two.writer.connect(two.owner.address)
        transfer = two.write()
        world.run(moment_us * 1e-6)

        two.owner.forget_peer(two.writer.address)
        world.run(30.0)

        assert transfer.status in ("done", "peer-lost")
        counted = two.owner.imm_counter(1).poll()
        assert counted == 1 if transfer.status == "done" else counted <= 1


def test_a_peer_that_stands_still_answers_when_it_moves() -> None:
    with sim.World(seed=5) as world:
        two = Two(world)
        two.writer.connect(two.owner.address)
        transfer = two.write()
        world.run(1e-6)
        world.freeze(two.owner, for_s=2.5)

        transfer.wait(60)

        assert world.now_s > 2.5
        two.owner.imm_counter(1).wait(1, 60)
        assert two.owner.imm_counter(1).poll() == 0


@pytest.mark.parametrize("nbytes", [1000, NBYTES // 2])
def test_nobody_is_asked_about_the_target_of_a_scatter_that_got_nothing(nbytes: int) -> None:
    """Its memory is as it was, which is no byte that changed on its way: nothing is said of checksums."""
    with sim.World(seed=7) as world:
        two = Two(world)
        other_host = world.host("other", nic="2xplain")
        other = other_host.engine(peer_timeout_s=3.0)
        elsewhere = other.register(np.zeros(NBYTES, np.uint8))
        events: list[str] = []
        for engine in (two.owner, other):
            engine.on_event(lambda event: events.append(event.kind))
            two.writer.connect(engine.address)
        landing = two.writer.register(np.zeros(NBYTES, np.uint8))
        world.partition(two.hosts[:1], two.hosts[1:])
        lost = two.write()
        world.run(2.0)
        world.partition(two.hosts[:1], [other_host], for_s=2.5)
        scatter = two.writer.submit_scatter(
            two.source, [two.target.descriptor, elsewhere.descriptor], lengths=nbytes,
            src_offsets=0, dst_offsets=0, imm=1, verify=True,
        )  # fmt: skip
        with pytest.raises(xr.PeerLost):
            lost.wait(60)
        world.heal(two.hosts[:1], two.hosts[1:])
        # The owner meets the writer anew and asks it something: who has to answer it knows it again.
        with pytest.raises(xr.PeerLost):
            two.owner.submit_write(two.target, landing.descriptor).wait(60)
        two.owner.forget_peer(two.writer.address)
        two.owner.submit_write(two.target, landing.descriptor, imm=2, verify=True).wait(60)
        assert scatter.status == "pending", "the other target has nothing yet"
        with pytest.raises(xr.PeerLost):
            scatter.wait(60)
        world.run(5.0)

        assert not two.target.array().any(), "nothing had reached it"
        assert (two.owner.imm_counter(1).poll(), other.imm_counter(1).poll()) == (0, 1)
        assert "checksum-mismatch" not in events


@pytest.mark.parametrize("moment_us", [0, 1, 2])
def test_who_was_forgotten_in_the_midst_of_a_scatter_is_met_anew_once(moment_us: int) -> None:
    """What is left of the scatter must not make a link of its own beside that of the next operation."""
    with sim.World(seed=6) as world:
        two = Two(world)
        other_host = world.host("other", nic="2xplain")
        other = other_host.engine(peer_timeout_s=3.0)
        elsewhere = other.register(np.zeros(NBYTES, np.uint8))
        for peer in (two.owner, other):
            two.writer.connect(peer.address)
        for rail in (0, 1):
            world.slow(other_host, rail, 10_000, for_s=1.0)  # so that it ends long after the peer was forgotten
        scatter = two.writer.submit_scatter(
            two.source, [two.target.descriptor, elsewhere.descriptor], lengths=NBYTES // 2,
            src_offsets=0, dst_offsets=0, imm=1, verify=True,
        )  # fmt: skip
        world.run(moment_us * 1e-6)

        two.writer.forget_peer(two.owner.address)
        two.writer.connect(two.owner.address)
        world.partition(two.hosts[:1], two.hosts[1:], for_s=0.3)
        after = [two.writer.submit_write(two.source, two.target.descriptor, 1000 + i, imm=2) for i in range(20)]

        with pytest.raises(xr.PeerLost):
            scatter.wait(60)
        for transfer in after:
            transfer.wait(60)
        world.run(1.0)
        assert two.owner.imm_counter(2).poll() == 20
        assert other.imm_counter(1).poll() == 1


def test_askers_that_die_again_and_again_get_a_bound_of_memory_and_take_nobodys_answer() -> None:
    """Each dies when all it asked is counted and most answers have not come to it: they are kept for a while."""
    asked, kept_max = 45, 16384
    with sim.World(seed=11) as world:
        owner = world.host("owner").engine(peer_timeout_s=3.0)
        target = owner.register(np.zeros(64, np.uint8))
        given_up: list[str] = []
        owner.on_event(lambda event: given_up.append(event.detail) if event.kind == "protocol-error" else None)
        living = world.host("living").engine(peer_timeout_s=3.0)
        source = living.register(np.zeros(64, np.uint8))
        living.connect(owner.address)
        dead, last = owner.imm_counter(1), owner.imm_counter(2)

        def die_untold(lives: range) -> int:
            untold = 0
            for life in lives:
                host = world.host(f"asker{life}")
                asker = host.engine(peer_timeout_s=3.0)
                its = asker.register(np.zeros(64, np.uint8))
                asker.connect(owner.address)
                transfers = [asker.submit_write(its, target.descriptor, 8, imm=1, verify=True) for _ in range(asked)]
                world.run(until=lambda counted=(life + 1) * asked: dead.poll() == counted)
                untold += sum(not transfer.done for transfer in transfers)
                world.kill(host)
            return untold

        assert kept_max / 7 < die_untold(range(100)) < kept_max
        world.run(60.0)
        assert not given_up, "each of them was tried seven times, and counted once"
        assert die_untold(range(100, 550)) > kept_max
        transfers = [living.submit_write(source, target.descriptor, 8, imm=2, verify=True) for _ in range(100)]
        world.run(60.0)

        assert [transfer.status for transfer in transfers] == ["done"] * 100
        assert (dead.poll(), last.poll()) == (550 * asked, 100)
        assert len(given_up) == 16, "and no more words than that"
        assert all(f"{kept_max} answers are kept already" in words for words in given_up)
