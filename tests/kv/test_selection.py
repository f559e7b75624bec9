"""Whom a router would choose: nodes by their work, prefixes remembered, refusals believed."""

from crossrail.kv.router.known_room import KnownRoom, Refusal
from crossrail.kv.router.selection import PrefixMemory, cost


def names_of(costs: list[tuple[int, int, str]]) -> list[str]:
    return [name for _, _, name in sorted(costs)]


def test_least_work_is_chosen_and_what_is_cached_is_no_work() -> None:
    idle, busy, busy_knows = cost(100, 0, 1000, "a"), cost(500, 0, 1000, "b"), cost(500, 900, 1000, "c")
    assert names_of([busy, idle]) == ["a", "b"]
    assert names_of([busy, idle, busy_knows]) == ["c", "a", "b"]
    assert names_of([cost(5, 0, 10, "z"), cost(5, 0, 10, "y")]) == ["y", "z"]


def test_prefix_memory_forgets_the_oldest() -> None:
    memory = PrefixMemory(names_max=3)
    names = [bytes([n]) for n in range(5)]
    memory.note(b"d0", names[:3])
    assert memory.match(b"d0", names) == 3 and memory.match(b"d1", names) == 0
    memory.note(b"d0", names[3:])
    assert memory.match(b"d0", names) == 0 and memory.match(b"d0", names[2:]) == 3
    memory.forget(b"d0")
    assert memory.match(b"d0", names[2:]) == 0


def test_refusal_is_believed_for_what_needs_no_less_room_until_there_is_news() -> None:
    room = KnownRoom()
    room.refused(100, Refusal("too large"), 0.0)
    assert [room.may_take(tokens) for tokens in (99, 100, 101)] == [True, False, False] and room.until_s == 0.2
    room.refused(50, Refusal("full"), 0.1)
    assert not room.may_take(60) and room.said == "full" and room.until_s == 0.1 + 0.4
    room.news()
    assert room.may_take(100)
    room.refused(100, Refusal("too large"), 1.0)
    assert room.may_take(60) and not room.may_take(100)


def test_decoder_that_refused_is_tried_once_and_believed_again_unless_it_has_room() -> None:
    room = KnownRoom()
    room.refused(50, Refusal("full"), 0.0)
    room.try_again()
    assert room.may_take(100) and room.until_s == float("inf")
    room.offered()
    assert not room.may_take(50) and room.may_take(49)
    for _ in range(2):
        assert room.refused_tokens == 50
        room.try_again()
    assert room.refused_tokens == float("inf"), "all are tried now and then"
    room.refused(50, Refusal("full"), 0.5)
    room.refused(100, Refusal("full"), 1.0)
    assert not room.may_take(50)
    room.taken(40)
    assert not room.may_take(50)
    room.taken(50)
    assert room.may_take(100)


def test_refusal_that_is_heard_again_is_believed_longer_and_one_offer_is_made_at_a_time() -> None:
    room = KnownRoom()
    assert room.offers_max == 8
    for pause_s in (0.2, 0.4, 0.6, 0.6):
        room.refused(100, Refusal("full"), 0.0)
        assert room.until_s == pause_s and room.offers_max == 1
    room.refused(100, Refusal("it is silent", 3.0), 0.0)
    assert room.until_s == 3.0
    for offers_max in range(1, 70):
        room.taken(10)
        assert room.offers_max == min(offers_max, 64)
    room.refused(100, Refusal("full"), 0.0)
    assert room.until_s == 0.2


def test_prefixes_of_many_nodes_have_room_in_common() -> None:
    memory = PrefixMemory(names_max=100, of_all_max=200)
    names = [bytes([n]) for n in range(100)]
    for _ in range(2):
        for node in range(10):
            memory.note(b"d%d" % node, names)
    assert [memory.match(b"d%d" % node, names[-20:]) for node in range(10)] == [20] * 10
    assert sum(map(len, memory._nodes.values())) == 200
