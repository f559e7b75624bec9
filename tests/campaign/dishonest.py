"""Campaigns whose processes break one promise each, and what the checkers say of it: a line of JSON for each.

    python tests/campaign/dishonest.py

Run in a process of its own: it forks, and goes into a network namespace.
"""

import contextlib
import io
import json
import os
from collections.abc import Callable
from typing import Any
from unittest import mock

from crossrail.campaign import rounds
from crossrail.campaign.child import Child
from crossrail.campaign.run import Campaign
from crossrail.transfers import Transfer

ROUNDS_MAX = 150

completed, report, tell, submit, close, cancel = (
    Child._completed, Child._report, Child._tell, Child._submit, Child._close, Child._cancel,
)  # fmt: skip


def completes_twice(self: Child, number: int, transfer: Transfer) -> None:
    completed(self, number, transfer)
    self._tell("completed", number, transfer.status, "")


def never_completes(self: Child, number: int, transfer: Transfer) -> None:
    if number % 20:
        completed(self, number, transfer)


def counts_one_more(self: Child, ask: int, imms: list[int]) -> None:
    for imm in imms[:1]:
        self._counter(imm)._give_back(1)
    report(self, ask, imms)


def writes_late(self: Child, ask: int, imms: list[int]) -> None:
    for slot in self._slots if len(imms) > 1 else ():  # of several it is asked at the end of a round only
        slot[0] ^= 0xFF
    report(self, ask, imms)


def delivers_twice(self: Child, *what: object) -> None:
    for _ in range(2 if what[0] == "message" else 1):
        tell(self, *what)


def loses_messages(self: Child, *what: object) -> None:
    if what[0] != "message":
        tell(self, *what)


def sends_other_bytes(self: Child, number: int, method: str, arguments: Any, options: dict[str, Any]) -> None:
    more = {"src_offset": options["src_offset"] + 1} if method == "submit_write" else {}
    submit(self, number, method, arguments, options | more)


def leaks_a_descriptor(self: Child, ask: int, timeout_s: float) -> None:
    os.dup(0)
    close(self, ask, timeout_s)


def dies(self: Child, number: int) -> None:
    os._exit(3)


MISTAKES: dict[str, tuple[str, Callable[..., None]]] = {
    "completes twice": ("_completed", completes_twice),
    "never completes": ("_completed", never_completes),
    "counts one more": ("_report", counts_one_more),
    "writes late": ("_report", writes_late),
    "delivers twice": ("_tell", delivers_twice),
    "loses messages": ("_tell", loses_messages),
    "sends other bytes": ("_submit", sends_other_bytes),
    "leaks a descriptor": ("_close", leaks_a_descriptor),
    "dies": ("_cancel", dies),
}


# Waits for what never comes, that honest processes on a slow machine need longer.
PATIENCE = {"never completes": {"_DRAIN_LIMIT_S": 1.0}}
PATIENCE["counts one more"] = PATIENCE["loses messages"] = {"_SETTLE_LIMIT_S": 3.0}


def said_of(name: str) -> str:
    """What the campaign prints; empty: it found nothing."""
    method, mistake = MISTAKES[name]
    campaign = Campaign("shm", 1)
    printed = io.StringIO()
    with (
        mock.patch.object(Child, method, mistake),
        mock.patch.object(rounds.Round, "_checked", return_value={}),  # the engine itself would be first to find some
        mock.patch.multiple(rounds, _STEPS=rounds._STEPS, **PATIENCE.get(name, {})),
        contextlib.redirect_stdout(printed),
    ):
        while campaign.failed == 0 and campaign.rounds < ROUNDS_MAX:
            campaign.round()
        campaign.close()
    return printed.getvalue()


if __name__ == "__main__":
    for name in MISTAKES:
        print(json.dumps([name, said_of(name)]), flush=True)
