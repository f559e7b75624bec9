"""Soaks whose processes break one promise each, and what the books say of it: a line of JSON for each.

    python tests/campaign/dishonest_soak.py

Run in a process of its own: it forks, and goes into a network namespace.
"""

import contextlib
import io
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from crossrail.campaign.soak import rounds
from crossrail.campaign.soak.life import Job, Life, Place
from crossrail.campaign.soak.records import DONE, ENDED, HANDED_SLOTS
from crossrail.campaign.soak.run import Soak
from crossrail.campaign.soak.worker import Worker
from crossrail.messages import Message

ROUNDS_MAX = 20
ROUND_S = 0.4

ended, close, message, submit, close_engine = Life._ended, Life._close, Life._message, Life.submit, Worker._close


def never_completes(self: Life, job: Job, transfer: Any) -> None:
    if job.rows[0] % 50:
        ended(self, job, transfer)


def counts_one_more(self: Life, job: Job, submit_now: Any) -> bool:
    """Some writes are submitted a second time, behind the book's back."""
    accepted = submit(self, job, submit_now)
    if accepted and job.kind == "barrier" and job.rows[0] % 5 == 0:
        with contextlib.suppress(Exception):
            submit_now()
    return accepted


def writes_late(self: Life, job: Job, place: Place, status: str) -> None:
    close(self, job, place, status)
    is_ours = place.slot is not None and place.slot[1] < HANDED_SLOTS.first  # the receiver looks at the others
    if is_ours and status == "done" and job.rows[0] % 50 == 0:
        place.memory[-1] ^= 0xFF


def delivers_twice(self: Life, arrived: Message) -> None:
    message(self, arrived)
    if arrived.data[0] % 2 == 1:  # of some lives
        message(self, arrived)


def loses_messages(self: Life, arrived: Message) -> None:
    if int(self.book.head["arrivals"][0]) % 7:
        message(self, arrived)
    else:
        self.book.head["arrivals"][0] += 1


def sends_other_bytes(self: Life, place: Place) -> None:
    if place.source is not None:
        place.source[:] = 1


def leaks_a_descriptor(self: Worker, ask: int, timeout_s: float) -> None:
    os.dup(0)
    close_engine(self, ask, timeout_s)


def notes_too_early(self: Life, job: Job, submit_now: Any) -> bool:
    """That it is done, as soon as it was submitted: which is wrong of some when the process is killed."""
    accepted = submit(self, job, submit_now)
    if accepted and job.completions == 0:
        self.book.rows["status"][job.rows] = DONE
        self.book.rows["state"][job.rows] = ENDED
    return accepted


MISTAKES: dict[str, tuple[type, str, Callable[..., Any]]] = {
    "never completes": (Life, "_ended", never_completes),
    "counts one more": (Life, "submit", counts_one_more),
    "writes late": (Life, "_close", writes_late),
    "delivers twice": (Life, "_message", delivers_twice),
    "loses messages": (Life, "_message", loses_messages),
    "sends other bytes": (Life, "fill", sends_other_bytes),
    "leaks a descriptor": (Worker, "_close", leaks_a_descriptor),
    "notes too early": (Life, "submit", notes_too_early),
}

# Waits for what never comes, that honest processes on a slow machine need longer.
PATIENCE = {"never completes": {"_DRAIN_LIMIT_S": 2.0}}
for _name in ("counts one more", "loses messages", "delivers twice", "notes too early"):
    PATIENCE[_name] = {"_SETTLE_LIMIT_S": 2.0}


def said_of(name: str, folder: Path) -> str:
    """What the soak prints; empty: it found nothing."""
    kind, method, mistake = MISTAKES[name]
    soak = Soak(["shm"], 1, ROUND_S, folder)
    printed = io.StringIO()
    with (
        mock.patch.object(kind, method, mistake),
        mock.patch.multiple(rounds, _PROBES=rounds._PROBES, **PATIENCE.get(name, {})),
        contextlib.redirect_stdout(printed),
    ):
        while soak.failed == 0 and soak.rounds < ROUNDS_MAX:
            soak.round()
        soak.close()
    return printed.getvalue()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        for number, name in enumerate(MISTAKES):
            left = Path(folder) / str(number)
            said = said_of(name, left)
            print(json.dumps([name, said, [path.name for path in left.glob("*/*")]]), flush=True)
