"""One turn of one adapter: time to the first byte, then every shape, then an orderly end."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from crossrail.cli.bench.peers.base import PAGE, Offer
from crossrail.cli.bench.peers.pair import PeerFailed, PeerPair, Settings
from crossrail.cli.bench.peers.work import Shape

_PASSES = 5
_SUBMIT_SHAPE = Shape("stream", 4096, 1, 16).name  # posts are timed in this one
_START_POOL_BYTES = 256 * PAGE


@dataclass
class Turn:
    """figures by name; what went wrong, if anything did. A turn may have both."""

    figures: dict[str, float] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)


def take_turn(offer: Offer, settings: Settings, shapes: Sequence[Shape]) -> Turn:
    """Runs a turn in processes of its own. Nothing that the library does raises: it becomes a failure in the turn."""
    turn = Turn()
    for part in (_start, _measure):
        try:
            part(offer, settings, shapes, turn)
        except PeerFailed as failure:
            _add(turn.failures, str(failure))
            if part is _start and "at exit" not in str(failure):
                break
    return turn


def _start(offer: Offer, settings: Settings, _: Sequence[Shape], turn: Turn) -> None:
    """The time from the first process's start until a message was there and back, with little memory."""
    if offer.is_limit:
        return
    with PeerPair(offer, dataclasses.replace(settings, pool_bytes=_START_POOL_BYTES)) as pair:
        pair.meet()
        back_ns, _ = pair.call("first_byte", "the first byte")
        took_s = (back_ns - pair.started_ns) / 1e9
        is_ours = offer.name.startswith("crossrail")
        turn.figures["first-byte"] = took_s if is_ours else took_s - pair.harness_s
        pair.end()


def _measure(offer: Offer, settings: Settings, shapes: Sequence[Shape], turn: Turn) -> None:
    with PeerPair(offer, settings) as pair:
        pair.meet()
        pair.call("fill")
        for shape in shapes:
            if offer.is_limit and shape.kind == "messages":
                continue
            sender, _ = pair.call("measure", shape.name, shape=shape.to_json(), passes=_PASSES)
            turn.figures |= figures(shape, sender)
        pair.end()


def figures(shape: Shape, answer: dict[str, Any]) -> dict[str, float]:
    """The figures in a sender's answer, in GB/s and us.

    Of several passes the fastest, because other programs on the machine can only slow them down; of round trips and
    submits, which are many, the median.
    """
    passes = answer["passes"]
    found = {"threads": float(answer["threads"])}
    if shape.kind == "messages":
        half_us = np.concatenate([each["rounds"] for each in passes]) / 2e3
        found[shape.name] = float(np.median(half_us))
        found[f"{shape.name}-p99"] = float(np.quantile(half_us, 0.99))
        return found
    found[shape.name] = max(each["moved"] / each["took"] for each in passes)
    if shape.name == _SUBMIT_SHAPE and answer["can_submit"]:
        found["submit"] = float(np.median(np.concatenate([each["posts"] for each in passes]))) / 1e3
    return found


def _add(failures: list[str], text: str) -> None:
    if text not in failures:
        failures.append(text)


@dataclass
class Outcome:
    """The results of all turns of one offer."""

    offer: Offer
    samples: dict[str, list[float]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def add(self, turn: Turn) -> None:
        """Another turn."""
        for name, value in turn.figures.items():
            self.samples.setdefault(name, []).append(value)
        for failure in turn.failures:
            _add(self.failures, failure)

    def value(self, name: str) -> float | None:
        """The median over turns."""
        samples = self.samples.get(name)
        return float(np.median(samples)) if samples else None


def take_turns(
    outcomes: Sequence[Outcome],
    settings: Settings,
    shapes: Sequence[Shape],
    runs: int,
    on_turn: Callable[[Offer, Turn], object],
) -> None:
    """Round robin, each run beginning with another offer. One that fails before its first figure is not retried."""
    for run in range(runs):
        first = run % len(outcomes)
        for outcome in (*outcomes[first:], *outcomes[:first]):
            if outcome.failures and not any(name.startswith(("write", "paged")) for name in outcome.samples):
                continue
            turn = take_turn(outcome.offer, settings, shapes)
            outcome.add(turn)
            on_turn(outcome.offer, turn)
