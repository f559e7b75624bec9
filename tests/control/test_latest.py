"""A dict that forgets what was added first."""

from __future__ import annotations

from crossrail._latest import Latest


def test_oldest_is_forgotten_for_a_new_one() -> None:
    latest: Latest[str, int] = Latest(2)
    latest["a"] = 1
    latest["b"] = 2
    latest["a"] = 3  # no new key, and no later one

    latest["c"] = 4

    assert list(latest.items()) == [("b", 2), ("c", 4)]


def test_every_way_to_add_forgets() -> None:
    latest: Latest[int, int] = Latest(2)
    for number in range(4):
        latest.setdefault(number, number)
    assert list(latest) == [2, 3]
    latest.update({4: 4})
    assert latest.setdefault(3, 9) == 3 and list(latest) == [3, 4]
    latest.move_to_end(3)
    latest |= {5: 5}
    assert list(latest) == [3, 5] and latest.pop(3) == 3 and len(latest) == 1
