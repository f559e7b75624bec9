"""The interface of kernels, the code that touches rows for dispatch and combine: six functions on arrays.

Arrays are C-contiguous and the implementation's own: numpy or torch in host memory for "cpu", torch for the others.
Numbers of rows are float32, float16 or bfloat16 (in numpy: uint16). An implementation reads and writes nothing outside
of the arrays it is given, whatever a table holds: it checks shapes, types and tables first, and raises UsageError,
naming argument, value and bound, before it has written anything.

All implementations give the same bits, except for which NaN a NaN is.

Threads: any; two calls at a time only on different outputs. Calls keep no array after they return. The GIL is let go by
"cpu".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class Kernels(Protocol):
    """Kernels of one implementation. T tokens, K routes of each, E experts, H numbers of a row."""

    name: str

    def count(self, indices: Any, experts: int, counts: Any, slots: Any) -> None:
        """Counts routes, and numbers those of each expert.

        indices: int32 or int64 [T, K], expert of each route, -1 for none. counts: int32 [E], becomes the number of
        routes to each expert. slots: int32 [T, K], becomes how many earlier routes, in the order of the array, have the
        same expert; -1 for none. Raises UsageError that names token, k and value of an index outside of [-1, E).
        """

    def pack(self, target: Any, x: Any, scales: Any | None, table: Any | None) -> None:
        """Makes rows to send: target's row i becomes x[table[i]] | scales[table[i]] | zeros, as bytes.

        target: uint8 [N or more, stride]. x: [T, ...] and scales: [T, ...] or None, of any type; a row of both has at
        most stride bytes. table: int32 [N] with values in [0, T); None: row i itself, N = T.
        """

    def pull(self, x: Any, scales: Any | None, source: Any, table: Any) -> None:
        """Takes such rows apart: for each (from, to) in table, x[to] and scales[to] become what is in source[from].

        x, scales: [rows, ...] of any type; rows that no `to` names stay as they are. source: uint8 [S, stride].
        table: int32 [N, 2]; where two have the same `to`, one of them wins.
        """

    def reduce(
        self, out: Any, sources: Sequence[Any], where: Any, weights: Any | None, accumulate: bool = False
    ) -> None:
        """Sums rows: out[t] becomes the sum of weights[t, k] * sources[s][r] over k = 0 .. K - 1, (s, r) = where[t, k].

        In float32: each product and each sum is rounded, from left to right; the last one once more, to the type of
        out. It begins with out[t] where accumulate, else with 0. out: [T, H]. sources: each [rows, H], all of one type,
        which may be another than that of out; none overlaps out. where: int32 [T, K, 2]; r = -1: no such term. weights:
        float32 [T, K]; None: all are 1, which makes partial sums for somebody else to add up.
        """

    def quantize(self, x: Any, block: int = 128) -> tuple[Any, Any]:
        """Eight bits for each number, as DeepEP makes them: (codes uint8 [T, H], scales float32 [T, ceil(H / block)]).

        Of each block of a row: m = max(largest magnitude, 1e-4), scale = m / 448, code = e4m3(x * (448 / m)), to
        nearest, ties to even, at most 448. A block with an infinity or a NaN has that for its scale. x: [T, H].
        """

    def dequantize(self, codes: Any, scales: Any, block: int = 128, dtype: str = "bfloat16") -> Any:
        """Number by number code * scale in float32, rounded to dtype: "float32", "float16" or "bfloat16". [T, H]."""
