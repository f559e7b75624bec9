"""Relieves a slow trainer that alone holds an expert: another one fetches the expert once, and sends it in its place.

In an update every inference rank with a copy of an expert is written to, so a trainer with a slow link sends each byte
that many times. Another one that reads it (2 bytes per element) and sends it on (1 byte per element and rank) takes
most of that off the slow link. Nothing is moved that the slow one could send while the others are busy anyway.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from crossrail.weights.planning.boxes import Ints, ranges
from crossrail.weights.planning.tables import Tables

_SLOW = 5, 4  # in costs: who is helped is 5/4 times as slow as who helps, or slower
_WORTH = 8  # a piece is fetched only if that takes an eighth of its bytes, or more, off its holder


class Mates(NamedTuple):
    """The trainers that hold any part of a parameter: parameter i's are trainer[first[i] : first[i + 1]], ascending."""

    first: Ints
    trainer: Ints


class HandedOver(NamedTuple):
    """holders: as given, but of cells that others send, these. is_relayed: those cells.

    already: bytes that are fetched from each trainer.
    """

    holders: tuple[Ints, Ints]
    is_relayed: npt.NDArray[np.bool_]
    already: Ints


def mates_of(joined: Tables, ranks: Ints) -> Mates:
    """Trainers as indices into ranks, by parameter."""
    rows, rank = joined.source
    pairs = np.unique(rows["name"].astype(np.int64) * len(ranks) + np.searchsorted(ranks, rank))
    param, trainer = pairs // len(ranks), pairs % len(ranks)
    return Mates(np.searchsorted(param, np.arange(len(joined.names) + 1)), trainer)


def hand_over(
    holders: tuple[Ints, Ints], mates: Mates, param: Ints, wanted: Ints, held: Ints, cost: Ints
) -> HandedOver:
    """holders: of each cell, who may send it, members[first[i] : first[i + 1]]. param: of each cell. wanted: bytes that
    all targets want of it; held: its bytes at the trainers. cost: of a byte at each trainer.

    Each slow trainer keeps what it can send in the time in which all together, each at its speed, would send all. Of
    the rest those cells go first that save most of its bytes.
    """
    first, members = holders
    counts = np.diff(first)
    alone = np.flatnonzero(counts == 1)
    owner = members[first[:-1][alone]]
    saved = wanted[alone] - held[alone]
    level = float(wanted.sum()) / float((1 / cost).sum())
    is_relayed = np.zeros(len(param), bool)
    already = np.zeros(len(cost), np.int64)
    for slow in np.flatnonzero(_is_slower(cost, cost.min())):
        own = np.flatnonzero(owner == slow)
        excess = int(wanted[alone[own]].sum() - level / cost[slow])
        able = own[
            (saved[own] * _WORTH >= held[alone[own]]) & _has_helper(mates, param[alone[own]], cost, int(cost[slow]))
        ]
        able = able[np.argsort(-saved[able], kind="stable")]
        before = np.cumsum(saved[able]) - saved[able]
        chosen = alone[able[before < excess]]
        is_relayed[chosen] = True
        already[slow] += held[chosen].sum()
    return HandedOver(_replaced(holders, mates, param, is_relayed, cost), is_relayed, already)


def _is_slower(cost: Any, than: Any) -> Any:
    return cost * _SLOW[1] >= than * _SLOW[0]


def _has_helper(mates: Mates, param: Ints, cost: Ints, slow: int) -> npt.NDArray[np.bool_]:
    """For each of these parameters, whether a fast enough trainer holds a part."""
    able = np.concatenate([[0], np.cumsum(_is_slower(slow, cost[mates.trainer]))])
    found: npt.NDArray[np.bool_] = able[mates.first[param + 1]] > able[mates.first[param]]
    return found


def _replaced(
    holders: tuple[Ints, Ints], mates: Mates, param: Ints, is_relayed: npt.NDArray[np.bool_], cost: Ints
) -> tuple[Ints, Ints]:
    """For cells that are relayed, the mates that are fast enough for their holder."""
    first, members = holders
    if not is_relayed.any():
        return holders
    kept = ~is_relayed[np.repeat(np.arange(len(param)), np.diff(first))]
    kept_cell, kept_member = np.repeat(np.arange(len(param)), np.diff(first))[kept], members[kept]
    cell = np.flatnonzero(is_relayed)
    counts = np.diff(mates.first)[param[cell]]
    helper = mates.trainer[np.repeat(mates.first[param[cell]], counts) + ranges(counts)]
    of = np.repeat(cell, counts)
    able = _is_slower(cost[members[first[:-1]]][of], cost[helper])
    cells = np.concatenate([kept_cell, of[able]])
    order = np.argsort(cells, kind="stable")
    cells = cells[order]
    return np.searchsorted(cells, np.arange(len(param) + 1)), np.concatenate([kept_member, helper[able]])[order]
