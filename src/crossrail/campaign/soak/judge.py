"""What must hold for the records of a finished round: pure functions that return the violations, in words.

An operation that a killed sender had not recorded as ended is in doubt: anything between nothing and all of it may have
been counted. One that it recorded as done was counted exactly once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from crossrail.campaign.books import Bytes
from crossrail.campaign.checks import TARGET_POISON, wrong_bytes
from crossrail.campaign.soak.records import (
    ACCEPTED,
    BUSY,
    CANCELLED,
    DONE,
    ENDED,
    FREE,
    HANDED,
    HANDED_SLOTS,
    INTENT,
    KINDS,
    REFUSED,
    SLOTS,
    STATUSES,
    SUSPECT,
    data,
    slot_offset,
)  # fmt: skip

Rows = npt.NDArray[Any]  # of records.ROW, ARRIVAL, SLOT
_WRITE, _SEND, _SCATTER = (KINDS.index(kind) for kind in ("write", "send", "scatter"))
_UNCOUNTED = [STATUSES.index(name) for name in ("peer-lost", "engine-closed")]


def open_rows(rows: Rows) -> list[str]:
    """Operations of a living, resting life that were accepted and have not completed."""
    found = np.flatnonzero((rows["state"] == INTENT) | (rows["state"] == ACCEPTED))
    return [
        f"operation {row} ({KINDS[rows['kind'][row]]}, {rows['nbytes'][row]} bytes) has not completed" for row in found
    ]


def statistics_agree(rows: Rows, before: Mapping[str, int], now: Mapping[str, int]) -> list[str]:
    """The engine's own statistics for the round, if the life goes on: everything submitted has ended, exactly once."""
    firsts = rows[(rows["is_first"] == 1) & (rows["state"] == ENDED)]
    noted = {
        "transfers_submitted": len(firsts),
        "transfers_done": int((firsts["status"] == DONE).sum()),
        "transfers_cancelled": int((firsts["status"] == CANCELLED).sum()),
    }
    noted["transfers_failed"] = len(firsts) - noted["transfers_done"] - noted["transfers_cancelled"]
    return [
        f"{name} says {now[name] - before[name]}, and {count} were noted"
        for name, count in noted.items()
        if now[name] - before[name] != count
    ] + ([f"{now['transfers_inflight']} transfers are in flight"] if now["transfers_inflight"] else [])


def counts_agree(rows: Rows, to: int, number: int, got: int) -> str:
    """Whether a receiver may have counted that many of the sender's number."""
    mine = rows[(rows["to"] == to) & (rows["number"] == number) & (rows["counts"] > 0)]
    least = int(mine["counts"][(mine["state"] == ENDED) & (mine["status"] == DONE)].sum())
    doubtful = (mine["state"] == INTENT) | (mine["state"] == ACCEPTED)
    doubtful |= (mine["state"] == ENDED) & (mine["status"] != DONE) & ~_counts_nothing(mine)
    most = least + int(mine["counts"][doubtful].sum())
    return "" if least <= got <= most else f"{got} counted of immediate {number}, must be {least} to {most}"


def leaves_no_share(rows: Rows, to: int) -> bool:
    """Whether no operation of a sender can have left a fraction of a count at that receiver."""
    mine = rows[(rows["to"] == to) & (rows["counts"] > 0)]
    whole = np.isin(mine["status"], (DONE, CANCELLED)) | (mine["is_verified"] == 1)
    return bool(((mine["state"] == REFUSED) | (mine["state"] == ENDED) & whole).all())


def _counts_nothing(rows: Rows) -> npt.NDArray[np.bool_]:
    """As in crossrail.campaign.checks: if cancelled, pages and targets count 1 or nothing each, a write nothing."""
    checked = (rows["is_verified"] == 1) & (rows["kind"] != _SCATTER)
    return np.where(
        checked, ~np.isin(rows["status"], _UNCOUNTED), (rows["status"] == CANCELLED) & (rows["kind"] == _WRITE)
    )


def messages_agree(rows: Rows, arrivals: Rows, life: int, to: int) -> list[str]:
    """Messages to a receiver that lives: what is done arrived once, what was cancelled did not, and no others did."""
    came = arrivals[(arrivals["state"] == ENDED) & (arrivals["life"] == life)]
    found = [f"message {row} arrived with other bytes" for row in came["row"][came["is_right"] == 0]]
    times = np.bincount(came["row"], minlength=len(rows))
    if len(times) > len(rows):
        return [*found, "a message arrived whose number nobody has"]
    sent = (rows["kind"] == _SEND) & (rows["to"] == to) & (rows["state"] >= INTENT)
    is_done = sent & (rows["state"] == ENDED) & (rows["status"] == DONE)
    is_cancelled = sent & (rows["state"] == ENDED) & (rows["status"] == CANCELLED)
    cases = (
        (times > 1, "was delivered {} times"),
        ((times > 0) & ~sent, "arrived {} times, and was not sent to this engine"),
        (is_done & (times == 0), "is done, and was delivered {} times"),
        (is_cancelled & (times > 0), "was cancelled, and was delivered {} times"),
    )
    for wrong, words in cases:
        found += [f"message {row} " + words.format(times[row]) for row in np.flatnonzero(wrong)[:3]]
    return found


def area_agrees(slab: Bytes, area: int, slots: Rows, is_alive: bool) -> list[str]:
    """The bytes of an area of a receiver that lives, by the sender's slots. is_alive: the sender, and it is at rest."""
    found = []
    for slot in range(SLOTS):
        record, at = slots[slot], slot_offset(area, slot)
        end = slot_offset(area, slot + 1) if slot + 1 < SLOTS else at + HANDED_SLOTS.nbytes
        state, nbytes = int(record["state"]), int(record["nbytes"])
        if state == SUSPECT:
            continue
        if state == FREE:
            nbytes = 0
        elif state == BUSY and is_alive:
            found.append(f"slot {slot} is busy, and nothing is under way")
        elif state in (BUSY, HANDED):  # its receiver poisons a handed one at any time
            begin = int(record["data_at"])
            if wrong := wrong_bytes(
                slab[at : at + nbytes], data()[begin : begin + nbytes], TARGET_POISON, is_done=False
            ):
                found.append(f"slot {slot} of a sender that was killed: {wrong}")
        if first := _touched(slab[at + nbytes : end]):
            found.append(f"slot {slot}, in which nothing is under way, was touched at byte {nbytes + first - 1}")
    return found


def whole_is_poison(slab: Bytes) -> str:
    """What is wrong with memory that was closed and poisoned; "" if it is unchanged."""
    return f"memory was touched after close(), at byte {first - 1}" if (first := _touched(slab)) else ""


def _touched(memory: Bytes) -> int:
    """The first byte that is not poison, counted from 1; 0: none."""
    if not (memory != TARGET_POISON).any():
        return 0
    return int(np.flatnonzero(memory != TARGET_POISON)[0]) + 1
