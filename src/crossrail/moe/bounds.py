"""How much memory a rank needs for an AllToAll: exact worst cases in rows and bytes.

Words: T = max_tokens, K = top_k, G = groups of ranks with the same tokens, N = G * T tokens in all, L = experts of
the rank that has most, F = groups that are far from the rank, P = rows of a private slot, p = padding. A token's
experts differ, so it has at most m = min(K, L) rows at a rank. (The paper's bound, arXiv 2510.27656 section 6, counts K
of them, and each expert's padding in full: with 4 experts on a rank, top 8, that is twice as much.) For what comes from
far all ranks have as much room as the one that has most experts; output_rows() is each rank's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class Sizes(Protocol):
    """The parts of a configuration that the arithmetic needs."""

    @property
    def max_tokens(self) -> int: ...
    @property
    def top_k(self) -> int: ...
    @property
    def experts(self) -> int: ...
    @property
    def groups(self) -> int: ...
    @property
    def experts_per_rank_max(self) -> int: ...
    @property
    def padding(self) -> int: ...
    @property
    def layout(self) -> str: ...
    @property
    def capacity_factor(self) -> float | None: ...
    @property
    def private_tokens(self) -> int | None: ...
    @property
    def stride_bytes(self) -> int: ...
    @property
    def y_bytes(self) -> int: ...


@dataclass(frozen=True)
class Bounds:
    """Rows of each buffer of a rank, for one parity; there are two of all. Some routing reaches each, but for sent_rows
    and result_rows: those are room for all routes of the rank, whose experts may be all far.

    rows_per_expert: of the output in layout "masked"; 0 in layout "grouped".
    output_rows: of the output of dispatch, and of what experts make of it, of y_bytes each.
    private_rows: P. far_rows: of the receive buffer for far rows, slots and remainder, of stride_bytes each.
    sent_rows: of the send buffer of dispatch, of stride_bytes each.
    returned_rows: of the send buffer of combine; result_rows: of its receive buffer; of y_bytes each.
    far_bytes: of these four buffers.
    """

    rows_per_expert: int
    output_rows: int
    private_rows: int
    far_rows: int
    sent_rows: int
    returned_rows: int
    result_rows: int
    far_bytes: int

    @classmethod
    def of(
        cls,
        sizes: Sizes,
        far_groups: int,
        returned_groups: int | None = None,
        summed_nodes: int | None = None,
        summed_ranks: int | None = None,
    ) -> Bounds:
        """Of a rank to which so many groups are far (Layout.far_groups): the member of each that sends to it.

        returned_groups: those that have any far member, since results go to all of them; None: the same.
        summed_nodes: with node_sums, how many others there are: a row of each token from each. summed_ranks: for how
        many ranks this one adds up; None: for one of each node.
        """
        returned_groups = far_groups if returned_groups is None else returned_groups
        routes = sizes.max_tokens * min(sizes.top_k, sizes.experts_per_rank_max)  # of one group to the rank
        slot = private_rows(sizes)
        far_rows = far_groups * max(slot, routes)  # slots, and from each group what does not fit its own
        sent_rows = sizes.max_tokens * sizes.top_k if far_groups else 0
        returned_rows = returned_groups * routes
        result_rows = sizes.max_tokens * sizes.top_k if returned_groups else 0
        if summed_nodes is not None:
            result_rows = summed_nodes * sizes.max_tokens
            returned_rows = result_rows if summed_ranks is None else summed_ranks * sizes.max_tokens
        in_and_out = (far_rows + sent_rows) * sizes.stride_bytes + (returned_rows + result_rows) * sizes.y_bytes
        return cls(
            rows_per_expert(sizes) if sizes.layout == "masked" else 0,
            output_rows(sizes),
            slot,
            far_rows,
            sent_rows,
            returned_rows,
            result_rows,
            in_and_out,
        )


def private_rows(sizes: Sizes) -> int:
    """P: as asked for, else one and a fifth of what a group sends to a rank when all experts are as popular."""
    if sizes.private_tokens is not None:
        return sizes.private_tokens
    mean = -(-sizes.max_tokens * sizes.top_k // sizes.experts)
    return mean * sizes.experts_per_rank_max * 6 // 5


def rows_per_expert(sizes: Sizes) -> int:
    """Layout "masked": all N tokens; with a capacity factor, that times an expert's share of all N * K routes."""
    worst = sizes.groups * sizes.max_tokens
    if sizes.capacity_factor is None:
        return worst
    share = -(-worst * sizes.top_k // sizes.experts)
    return max(1, int(min(worst, sizes.capacity_factor * share)))


def output_rows(sizes: Sizes, experts: int | None = None) -> int:
    """Rows of dispatch's output at a rank that has so many experts; None: at the one that has most.

    Layout "masked": L * rows_per_expert. Layout "grouped": N * m routes, in blocks of p rows. The first block of an
    expert costs one route, each further one p more routes, and an expert has at most ceil(N / p) of them:
        p * (min(L, N * m) + min((N * m - min(L, N * m)) // p, L * (ceil(N / p) - 1)))
    With a capacity factor: that times the share of L experts of all N * K routes, 1 at least, and p - 1 rows more for
    each one. Without experts 0.
    """
    local, pad = sizes.experts_per_rank_max if experts is None else experts, sizes.padding
    if sizes.layout == "masked":
        return local * rows_per_expert(sizes)
    tokens = sizes.groups * sizes.max_tokens
    routes = tokens * min(sizes.top_k, local)
    first = min(local, routes)
    further = min((routes - first) // pad, local * (-(-tokens // pad) - 1))
    worst = pad * (first + further)
    if sizes.capacity_factor is None:
        return worst
    share = -(-tokens * sizes.top_k // sizes.experts) * local
    return min(worst, max(1, int(min(worst, sizes.capacity_factor * share))) + local * (pad - 1))
