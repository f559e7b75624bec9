"""What the books of a round must say: pure functions over records."""

import numpy as np

from crossrail.campaign.checks import TARGET_POISON
from crossrail.campaign.soak import judge
from crossrail.campaign.soak.records import (
    ACCEPTED,
    ARRIVAL,
    BUSY,
    CANCELLED,
    DONE,
    ENDED,
    INTENT,
    KINDS,
    REFUSED,
    ROW,
    SLAB_BYTES,
    SLOT,
    SLOTS,
    STATUSES,
    SUSPECT,
    data,
    number_of,
    slot_offset,
)  # fmt: skip

LOST = STATUSES.index("peer-lost")


def rows(*given: tuple[str, int, int, int], to: int = 9, number: int = 16, verified: bool = False) -> np.ndarray:
    """Of kind, state, status and counts each."""
    made = np.zeros(len(given), ROW)
    for row, (kind, state, status, counts) in zip(made, given, strict=True):
        row["kind"], row["state"], row["status"], row["counts"] = KINDS.index(kind), state, status, counts
        row["to"], row["number"], row["is_verified"], row["is_first"], row["nbytes"] = to, number, verified, 1, 100
    return made


def allowed(book: np.ndarray) -> list[int]:
    return [got for got in range(20) if not judge.counts_agree(book, 9, 16, got)]


def test_what_is_done_is_counted_once() -> None:
    assert allowed(rows(("write", ENDED, DONE, 1), ("paged", ENDED, DONE, 13))) == [14]


def test_what_a_killed_sender_had_under_way_may_be_counted() -> None:
    book = rows(("write", ENDED, DONE, 1), ("write", INTENT, 0, 1), ("paged", ACCEPTED, 0, 3))
    assert allowed(book) == [1, 2, 3, 4, 5]


def test_a_cancelled_write_is_not_counted_and_pages_may_be() -> None:
    assert allowed(rows(("write", ENDED, CANCELLED, 1))) == [0]
    assert allowed(rows(("paged", ENDED, CANCELLED, 2))) == [0, 1, 2]
    assert allowed(rows(("barrier", ENDED, CANCELLED, 1))) == [0, 1]


def test_a_checked_write_that_failed_is_counted_only_by_a_peer_that_was_given_up() -> None:
    assert allowed(rows(("paged", ENDED, CANCELLED, 2), verified=True)) == [0]
    assert allowed(rows(("write", ENDED, LOST, 1), verified=True)) == [0, 1]


def test_other_receivers_and_refused_ones_count_nothing() -> None:
    assert allowed(rows(("write", REFUSED, 0, 1))) == [0]
    assert allowed(rows(("write", ENDED, DONE, 1), to=8)) == [0]


def test_only_what_failed_may_leave_a_fraction_of_a_count() -> None:
    assert judge.leaves_no_share(rows(("write", ENDED, DONE, 1), ("paged", ENDED, CANCELLED, 9), ("send", 0, 0, 0)), 9)
    assert judge.leaves_no_share(rows(("write", ENDED, LOST, 1), verified=True), 9)
    assert judge.leaves_no_share(rows(("write", ENDED, LOST, 1)), 8)
    assert not judge.leaves_no_share(rows(("write", ENDED, LOST, 1)), 9)
    assert not judge.leaves_no_share(rows(("write", ACCEPTED, 0, 1)), 9)


def test_messages_arrive_once() -> None:
    book = rows(
        ("send", ENDED, DONE, 0), ("send", ENDED, CANCELLED, 0), ("send", ACCEPTED, 0, 0), ("write", ENDED, 1, 1)
    )
    came = np.zeros(6, ARRIVAL)
    came["life"], came["state"], came["is_right"], came["row"] = 5, ENDED, 1, [0, 1, 2, 2, 3, 0]

    assert judge.messages_agree(book, came[[0, 2]], 5, 9) == []
    assert judge.messages_agree(book, came[:0], 5, 9) == ["message 0 is done, and was delivered 0 times"]
    assert judge.messages_agree(book, came, 5, 9) == [
        "message 0 was delivered 2 times",
        "message 2 was delivered 2 times",
        "message 3 arrived 1 times, and was not sent to this engine",
        "message 1 was cancelled, and was delivered 1 times",
    ]
    came["is_right"][0] = 0
    assert judge.messages_agree(book, came[[0]], 5, 9) == ["message 0 arrived with other bytes"]


def test_what_has_not_ended_is_named_and_the_engines_own_statistics_are_compared() -> None:
    book = rows(("write", ENDED, DONE, 1), ("send", ENDED, CANCELLED, 0), ("read", ACCEPTED, 0, 0))
    stats = {"transfers_submitted": 12, "transfers_done": 11, "transfers_cancelled": 1, "transfers_failed": 0}
    before = {"transfers_submitted": 10, "transfers_done": 10, "transfers_cancelled": 0, "transfers_failed": 0}

    assert judge.open_rows(book) == ["operation 2 (read, 100 bytes) has not completed"]
    assert judge.statistics_agree(book, before, stats | {"transfers_inflight": 0}) == []
    assert judge.statistics_agree(book, before, stats | {"transfers_done": 12, "transfers_inflight": 3}) == [
        "transfers_done says 2, and 1 were noted",
        "3 transfers are in flight",
    ]


def test_bytes_of_an_area_are_old_or_new_where_a_killed_sender_was_at_it_and_poison_elsewhere() -> None:
    slab = np.full(SLAB_BYTES, TARGET_POISON, np.uint8)
    slots = np.zeros(SLOTS, SLOT)
    slots[3]["state"], slots[3]["data_at"], slots[3]["nbytes"] = BUSY, 1000, 200
    at = slot_offset(2, 3)
    slab[at : at + 100] = data()[1000:1100]

    assert judge.area_agrees(slab, 2, slots, is_alive=False) == []
    assert judge.area_agrees(slab, 2, slots, is_alive=True) == ["slot 3 is busy, and nothing is under way"]
    slab[at + 150] = 0
    assert "neither old nor new" in judge.area_agrees(slab, 2, slots, is_alive=False)[0]
    slots[3]["state"] = SUSPECT
    assert judge.area_agrees(slab, 2, slots, is_alive=False) == []
    slab[slot_offset(2, 5) + 7] = 1
    assert judge.area_agrees(slab, 2, slots, is_alive=False) == [
        "slot 5, in which nothing is under way, was touched at byte 7"
    ]
    assert judge.whole_is_poison(slab) == f"memory was touched after close(), at byte {at}"


def test_numbers_of_lives_rounds_and_slots_differ() -> None:
    numbers = {number_of(life, turn, slot) for life in (1, 2) for turn in (1, 2) for slot in (None, 0, 7)}
    assert len(numbers) == 12
    assert max(number_of(8191, 1023, 7), *numbers) < 1 << 27  # below those that alloc_imm() hands out
