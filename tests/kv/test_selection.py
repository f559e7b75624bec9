"""Whom a router would choose: candidates by their work, prefixes remembered, refusals believed."""

from crossrail.kv import messages as m
from crossrail.kv.membership import Member
from crossrail.kv.placement import Refusals
from crossrail.kv.selection import Candidate, PrefixMemory, rank
from tests.support.kv_cluster import LAYOUT, node_record


def candidate(name: str, waiting: int, cached: int) -> Candidate:
    return Candidate(Member(node_record(name), LAYOUT, m.Load(), 0.0), waiting, cached)


def test_least_work_is_chosen_and_what_is_cached_is_no_work() -> None:
    idle, busy, busy_knows = candidate("a", 100, 0), candidate("b", 500, 0), candidate("c", 500, 900)
    assert [c.member.name for c in rank([busy, idle], 1000)] == ["a", "b"]
    assert [c.member.name for c in rank([busy, idle, busy_knows], 1000)] == ["c", "a", "b"]
    assert [c.member.name for c in rank([candidate("z", 5, 0), candidate("y", 5, 0)], 10)] == ["y", "z"]


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
    refusals = Refusals()
    refusals.note(b"d0", 100, "too large", 0.0)
    assert [refusals.of(b"d0", tokens, 0.1) for tokens in (99, 100, 101)] == ["", "too large", "too large"]
    refusals.note(b"d0", 50, "full", 0.1)
    assert refusals.of(b"d0", 60, 0.2) == "full" and not refusals.of(b"d1", 60, 0.2)
    refusals.news(b"d0")
    assert not refusals.of(b"d0", 100, 0.2)
    refusals.note(b"d0", 100, "too large", 0.2)
    assert refusals.of(b"d0", 60, 0.3) == "" and refusals.of(b"d0", 100, 0.3) and not refusals.of(b"d0", 100, 10.0)
    refusals.keep({b"d1"})
    assert not refusals._decoders


def test_prefixes_of_many_nodes_have_room_in_common() -> None:
    memory = PrefixMemory(names_max=100, of_all_max=200)
    names = [bytes([n]) for n in range(100)]
    for _ in range(2):
        for node in range(10):
            memory.note(b"d%d" % node, names)
    assert [memory.match(b"d%d" % node, names[-20:]) for node in range(10)] == [20] * 10
    assert sum(map(len, memory._nodes.values())) == 200
