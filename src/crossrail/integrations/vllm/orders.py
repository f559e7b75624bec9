"""What the scheduler's side tells the workers in each step. Plain data: vLLM pickles it for its other processes.

Requests are named by vLLM's request_id here; transfer_id is their name between the two instances.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from crossrail.integrations.instance import Instance

NO_BLOCK = 0  # vLLM's null block


@dataclass(frozen=True)
class Offer:
    """A request whose prompt this instance prefills for another. prompt: its identity, for comparison, or b""."""

    request: str
    transfer_id: str
    tokens: int
    prompt: bytes


@dataclass(frozen=True)
class Chunk:
    """This step computes an offer's tokens up to `end`, exclusive. blocks: the request's, from its `first` on."""

    request: str
    end: int
    first: int
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class Wanted:
    """A request whose KV is at another instance, and that waits for blocks here."""

    request: str
    transfer_id: str
    instance: Instance


@dataclass(frozen=True)
class Load:
    """Fetch a request's KV. blocks: of all its tokens; the first prefix_tokens of them are here already. NO_BLOCK, at
    the front: for tokens that a sliding window has left behind; it is shared, and nothing is fetched into it.

    wanted None: it cannot be fetched at all, and `why` gives the reason; its failure is reported like any other load's.
    """

    request: str
    wanted: Wanted | None
    why: str
    tokens: int
    prefix_tokens: int
    blocks: tuple[int, ...]
    prompt: bytes


@dataclass
class Orders:
    """One step's. idle: it computes nothing.

    Producer: offers before chunks. preempted: blocks of these offers are taken back now, and what was computed is lost.
    stale: what was computed of these, and perhaps sent, must not be mixed with what is computed from now on.
    finished: computed to the end; to be held until fetched, or until the lease ends. dropped: nobody is to get it; its
    blocks are held until nothing reads them. Both are reported as finished_sending, once.
    Consumer: wanted, then load, or release when it will not be loaded; cancel ends a load. Each load is reported as
    finished_recving, once, also when it was cancelled.
    """

    idle: bool = False
    offers: list[Offer] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    stale: list[str] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    wanted: list[Wanted] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    releases: list[str] = field(default_factory=list)
    cancels: list[str] = field(default_factory=list)
