"""Who sends which part to whom, and what ranks tell each other about themselves through verl's controller.

Each rollout rank gets every bucket. With at least as many trainer ranks as rollout ranks, several of them share the
sending to one: each sends a part of every bucket. With fewer, each sends whole buckets to several.
"""

from __future__ import annotations

from typing import NamedTuple

from crossrail.regions import RegionDescriptor


class Rank(NamedTuple):
    """Where a rank can be written to. Plain values, since they travel with verl's.

    address: of its engine. weights, tables: descriptors of two halves each; one is filled while the other is read.
    halves: the immediates that announce that a half is filled, at a rollout rank, or free, at a trainer rank. gave_up:
    another immediate. bucket_bytes: half the weights.
    """

    name: str
    address: bytes
    weights: bytes
    tables: bytes
    halves: tuple[int, int]
    gave_up: int
    bucket_bytes: int

    @property
    def weights_there(self) -> RegionDescriptor:
        return RegionDescriptor.from_bytes(self.weights)

    @property
    def tables_there(self) -> RegionDescriptor:
        return RegionDescriptor.from_bytes(self.tables)


class Share(NamedTuple):
    """Part number `part` of `of` of a bucket."""

    part: int
    of: int

    def bounds(self, bucket_bytes: int, align: int) -> tuple[int, int]:
        """First byte, and the one behind the last."""
        first, last = (bucket_bytes * i // self.of // align * align for i in (self.part, self.part + 1))
        return first, bucket_bytes if self.part + 1 == self.of else last


def senders_of(rollout: int, trainers: int, rollouts: int) -> list[int]:
    """The trainer ranks that send to that rollout rank. All trainer ranks send to some, about as much."""
    if trainers < rollouts:
        return [rollout * trainers // rollouts]
    return [trainer for trainer in range(trainers) if trainer * rollouts // trainers == rollout]


def targets_of(trainer: int, trainers: int, rollouts: int) -> list[int]:
    """The inverse."""
    return [rollout for rollout in range(rollouts) if trainer in senders_of(rollout, trainers, rollouts)]
