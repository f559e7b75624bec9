"""How a file is cut into shuffled pages: pure functions that both processes of the demo compute alike."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Indices = npt.NDArray[np.int64]

# A small file is copied several times over, so that a round moves far more than the caches hold; up to this often.
_COPIES_MAX = 4096
# Pages of one round, so that index arrays stay small beside the data.
_PAGES_MAX = 1 << 20


@dataclass(frozen=True)
class Segment:
    """A piece of the file that fits the pool: `copies` copies of it go over in one round.

    Page p of copy c of the segment lands at page `order[c * pages + p]` of the pool. The last page of a copy may be
    shorter than a page (`tail_bytes` long, else 0).
    """

    offset: int
    nbytes: int
    copies: int
    page_bytes: int
    seed: int

    @property
    def whole_pages(self) -> int:
        """Full pages of one copy."""
        return self.nbytes // self.page_bytes

    @property
    def tail_bytes(self) -> int:
        """Length of the last, shorter page; 0 when all are full."""
        return self.nbytes % self.page_bytes

    @property
    def pages(self) -> int:
        """Pages of one copy, the short one included."""
        return self.whole_pages + (self.tail_bytes > 0)

    @property
    def total_pages(self) -> int:
        """Pages of a round: what the receiver counts."""
        return self.pages * self.copies

    @property
    def total_bytes(self) -> int:
        """Bytes of a round."""
        return self.nbytes * self.copies

    def places(self) -> Indices:
        """Where in the pool each page goes: shape (copies, pages)."""
        import numpy as np  # here: who asks for help need not wait for it

        order = np.random.default_rng(self.seed).permutation(self.total_pages)
        return order.astype(np.int64).reshape(self.copies, self.pages)

    def to_json(self) -> dict[str, Any]:
        """The numbers, for the other process."""
        return asdict(self)


def shuffled_pages(segment: Segment) -> tuple[Indices, Indices]:
    """(source page, pool page) of every full page of every copy, in an order as random as the places are."""
    import numpy as np

    places = segment.places()[:, : segment.whole_pages]
    sources = np.broadcast_to(np.arange(segment.whole_pages, dtype=np.int64), places.shape)
    turn = np.random.default_rng(segment.seed + 1).permutation(places.size)
    return sources.reshape(-1)[turn].copy(), places.reshape(-1)[turn].copy()


def tail_places(segment: Segment) -> Indices:
    """Pool page of the short last page of each copy; empty if there is none."""
    return segment.places()[:, segment.whole_pages :].reshape(-1)


def split_file(nbytes: int, pool_bytes: int, page_bytes: int, seed: int) -> Iterator[Segment]:
    """The segments of a file: the same one several times if it is smaller than the pool; else as many as needed."""
    segment_bytes = min(max(pool_bytes // page_bytes, 1), _PAGES_MAX) * page_bytes
    pages = -(-min(nbytes, segment_bytes) // page_bytes)
    copies = max(1, min(segment_bytes // (pages * page_bytes), _COPIES_MAX, _PAGES_MAX // pages))
    for index, offset in enumerate(range(0, nbytes, segment_bytes)):
        length = min(segment_bytes, nbytes - offset)
        yield Segment(offset, length, copies if nbytes <= segment_bytes else 1, page_bytes, seed + 2 * index)
