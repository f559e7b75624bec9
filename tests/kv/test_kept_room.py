"""For whom a decoder keeps what comes back, on times that the tests make up."""

from crossrail.kv.nodes.kept_room import KEPT_IN_A_ROW_S, KeptRoom

A, B = (b"router a", "r1"), (b"router b", "r1")


def test_room_is_kept_until_its_router_has_been_silent() -> None:
    room = KeptRoom(kept_s=4.0)
    assert not room.ask(*A, 10.0)
    assert room.is_for_another(*B, 13.9) and not room.is_for_another(*A, 13.9)
    assert not room.is_for_another(*B, 14.1)
    assert not room.end(*B) and room.end(*A)
    assert not room.is_for_another(*B, 10.1)


def asked_until_its_turn_is_over(room: KeptRoom) -> float:
    """When that was."""
    now_s = 10.0
    while not room.ask(*A, now_s):
        assert room.is_for_another(*B, now_s)
        now_s += 0.25
    assert now_s == 10.0 + KEPT_IN_A_ROW_S
    return now_s


def test_who_has_had_it_for_long_yields_for_a_second() -> None:
    room = KeptRoom(kept_s=4.0)
    now_s = asked_until_its_turn_is_over(room)
    assert not room.ask(*A, now_s + 0.9) and not room.is_for_another(*B, now_s + 0.9)
    assert not room.ask(*A, now_s + 1.0) and room.is_for_another(*B, now_s + 1.0)
    assert not room.ask(*A, now_s + 10.9)


def test_who_has_had_it_for_long_yields_until_another_has_started() -> None:
    room = KeptRoom(kept_s=4.0)
    now_s = asked_until_its_turn_is_over(room)
    assert not room.start(*B)
    assert not room.ask(*A, now_s + 0.2) and room.is_for_another(*B, now_s + 0.2)


def test_another_that_waits_has_its_turn_meanwhile() -> None:
    room = KeptRoom(kept_s=4.0)
    now_s = asked_until_its_turn_is_over(room)
    assert not room.ask(*B, now_s + 0.1)
    assert not room.ask(*A, now_s + 2.0) and room.is_for_another(*A, now_s + 2.0)
