"""Which requests of earlier routers the next one keeps."""

from __future__ import annotations

import pytest

from crossrail.kv import messages as m
from crossrail.kv.router import adoptions as adoptions_module
from crossrail.kv.router.adoptions import Adopted, Adoptions

KEPT = 3
END = m.End("length")


@pytest.fixture
def adoptions(monkeypatch: pytest.MonkeyPatch) -> Adoptions:
    monkeypatch.setattr(adoptions_module, "_ADOPTIONS_KEPT", KEPT)
    return Adoptions()


def known(adoptions: Adoptions, *names: str) -> list[str]:
    return [name for name in names if adoptions.get(name) is not None]


def add_ended(adoptions: Adoptions, decoder: str, count: int) -> list[str]:
    names = [f"{decoder}-{index}" for index in range(count)]
    for name in names:
        adoptions.add(name, decoder.encode(), has_ended=True)
    return names


def test_what_runs_is_never_given_up_for_what_has_ended(adoptions: Adoptions) -> None:
    running = [f"running-{index}" for index in range(2 * KEPT)]
    for name in running:
        adoptions.add(name, b"d0", has_ended=False)

    ended = add_ended(adoptions, "d0", 5)

    assert known(adoptions, *running) == running
    assert known(adoptions, *ended) == ended[-KEPT:]
    assert all(adoptions.take(name, b"d0", 0, [1], None) for name in running)


def test_each_decoder_has_the_latest_of_its_own_kept(adoptions: Adoptions) -> None:
    names = {decoder: add_ended(adoptions, decoder, 5) for decoder in ("d0", "d1", "d2")}
    for ended in names.values():
        assert known(adoptions, *ended) == ended[-KEPT:]


def test_what_ran_and_ends_is_the_latest_that_has_ended(adoptions: Adoptions) -> None:
    adoptions.add("ran", b"d0", has_ended=False)
    ended = add_ended(adoptions, "d0", KEPT)

    assert adoptions.take("ran", b"d0", 0, [7, 8], END)
    assert adoptions.take("ran", b"d0", 0, [7, 8], END)  # once more, since the answer was lost

    assert known(adoptions, *ended) == ended[1:]
    assert adoptions.get("ran").tokens == [7, 8] and adoptions.get("ran").end == END


def test_of_decoders_that_are_gone_the_latest_of_all_are_kept(adoptions: Adoptions) -> None:
    for decoder in ("d0", "d1"):
        add_ended(adoptions, decoder, 1)
        adoptions.add(f"{decoder}-ran", decoder.encode(), has_ended=False)
    ended = add_ended(adoptions, "d2", KEPT)

    adoptions.on_gone(b"d0")
    adoptions.on_gone(b"d1")

    assert known(adoptions, "d0-0", "d0-ran", "d1-0", "d1-ran", *ended) == ["d0-ran", "d1-0", "d1-ran", *ended]


def test_what_runs_at_a_decoder_that_is_back_is_kept_again(adoptions: Adoptions) -> None:
    adoptions.add("runs", b"d0", has_ended=False)
    adoptions.take("runs", b"d0", 0, [7], None)
    adoptions.on_gone(b"d0")
    assert adoptions.take("runs", b"d0", 1, [8], None)

    adoptions.add("runs", b"d0", has_ended=False)
    add_ended(adoptions, "d0", 2 * KEPT)
    add_ended(adoptions, "d1", 2 * KEPT)
    adoptions.on_gone(b"d1")

    assert adoptions.get("runs").tokens == [7, 8]


def test_what_ends_at_a_decoder_that_is_back_without_it_is_in_one_table(adoptions: Adoptions) -> None:
    adoptions.add("ends", b"d0", has_ended=False)
    adoptions.on_gone(b"d0")
    adoptions.add("other", b"d0", has_ended=False)
    adoptions.take("ends", b"d0", 0, [7], END)

    add_ended(adoptions, "d0", 2 * KEPT)
    add_ended(adoptions, "d1", 2 * KEPT)
    adoptions.on_gone(b"d1")

    assert adoptions.get("ends") is None


def test_one_name_at_two_decoders_is_that_of_the_first(adoptions: Adoptions) -> None:
    adoptions.add("r1", b"d0", has_ended=False)
    adoptions.add("r1", b"d1", has_ended=True)

    assert not adoptions.take("r1", b"d1", 0, [1], END)
    assert adoptions.take("r1", b"d0", 0, [2], None)
    assert adoptions.get("r1").tokens == [2] and adoptions.get("r1").end is None


def test_tokens_that_come_again_and_late_take_nothing_back() -> None:
    adopted = Adopted(b"d0")
    for first, tokens in ((0, [1, 2]), (0, [1, 2, 3]), (0, [1]), (1, [2, 3]), (3, [4]), (2, [3])):
        adopted.take(first, tokens, None)
    assert adopted.tokens == [1, 2, 3, 4]
