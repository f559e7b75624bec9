"""Peers that forget each other, and what they then have to say to each other after all."""

import crossrail as xr
from crossrail import sim


def lost_after_both_forgot(seed: int, pause_s: float, rest_s: float) -> str:
    """Both have written to each other and forget each other; then one writes again. What it is told when it fails."""
    with sim.World(seed) as world:
        a, b = world.host("a").engine("a"), world.host("b").engine("b")
        at_a, at_b = a.alloc(4096), b.alloc(4096)
        to_a, to_b = at_a.descriptor, at_b.descriptor
        a.submit_write(at_a, to_b, imm=1).wait(5)
        b.submit_write(at_b, to_a, imm=1).wait(5)
        a.forget_peer(to_b.owner)
        world.run(pause_s)
        b.forget_peer(to_a.owner)
        world.run(rest_s)
        try:
            a.submit_write(at_a, to_b, imm=2).wait(20)
        except xr.PeerLost as error:
            return f"seed {seed}: {error}"
    return ""


def test_after_both_forgot_each_other_neither_keeps_the_session() -> None:
    """What they say of it travels in any order: "I have no link", "nor do I need the session"."""
    assert [text for seed in range(20) if (text := lost_after_both_forgot(seed, 0.02, 1.5))] == []


def lost_after_one_forgot(seed: int) -> str:
    """Only one has written and forgets the other, which then needs the session as little; later it writes."""
    with sim.World(seed) as world:
        a = world.host("a").engine("a")
        world.run(world.rng.uniform(0, 0.1))
        b = world.host("b").engine("b")
        src, dst = a.alloc(4096), b.alloc(4096)
        to_b = dst.descriptor
        a.submit_write(src, to_b, imm=1).wait(5)
        world.run(world.rng.uniform(0, 0.1))  # the ticks of the two are any time apart
        a.forget_peer(to_b.owner)
        world.run(world.rng.uniform(0.1, 0.15))
        try:
            a.submit_write(src, to_b, imm=2).wait(5)
        except xr.PeerLost as error:
            return f"seed {seed}: {error}"
    return ""


def test_a_peer_is_written_to_again_while_both_let_the_session_go() -> None:
    assert [text for seed in range(150) if (text := lost_after_one_forgot(seed))] == []
