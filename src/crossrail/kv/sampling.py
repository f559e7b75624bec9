"""From logits to a token: greedy, or drawn by seed and position alone, so equal wherever it is run."""

from __future__ import annotations

import math
import threading

import numpy as np
import numpy.typing as npt

from crossrail.errors import CrossrailError
from crossrail.kv.messages import Sampling


def sample(logits: npt.NDArray[np.float32], sampling: Sampling, position: int) -> int:
    """The next token. logits: shape (vocabulary,). position: of the token to be drawn, counted from the prompt's first.

    Ties go to the smaller token. Same arguments, same token: nothing else takes part. Raises CrossrailError for logits
    that are not numbers, or have another shape. It runs on a decoder's event loop for each token of each request, so
    nothing here sorts a whole vocabulary, unless all of it is about equally likely.
    """
    if np.ndim(logits) != 1 or not len(logits):
        shape = np.shape(logits)
        raise CrossrailError(f"the model's logits for position {position} have the shape {shape}, not (vocabulary,)")
    likeliest = int(logits.argmax())  # the first that is no number, if there is one
    if not math.isfinite(logits[likeliest]):
        raise CrossrailError(f"the model's logits for position {position} are not numbers: {logits[likeliest]}")
    if sampling.temperature == 0.0:
        return likeliest
    weights = logits - logits[likeliest]
    with np.errstate(over="ignore"):  # a temperature of almost nothing: all but the largest become exp(-inf)
        np.divide(weights, sampling.temperature, out=weights, dtype=np.float64, casting="same_kind")
    np.exp(weights, out=weights)
    kept = _likeliest(weights, sampling.top_p) if sampling.top_p < 1.0 else None
    # In the order of tokens, not of weights: rounding moves its borders a little, but cannot exchange two tokens.
    cumulative = (weights if kept is None else weights[kept]).cumsum(dtype=np.float64)
    drawn = int(cumulative.searchsorted(_draws.draw(sampling.seed, position) * cumulative[-1], side="right"))
    return drawn if kept is None else int(kept[drawn])


class _Draws(threading.local):
    """What `Generator(Philox(key=[seed, position])).random()` says. To make those two for each token takes longer than
    all else that is done for it, so each thread has them once, and sets their state.
    """

    def __init__(self) -> None:
        self._philox = np.random.Philox(key=[0, 0])
        self._generator = np.random.Generator(self._philox)
        self._fresh = self._philox.state
        self._key = self._fresh["state"]["key"]

    def draw(self, seed: int, position: int) -> float:
        self._key[:] = seed, position
        self._philox.state = self._fresh
        return self._generator.random()


_draws = _Draws()


def _likeliest(weights: npt.NDArray[np.float32], top_p: float) -> npt.NDArray[np.intp]:
    """The fewest tokens that hold top_p of the weight, one of them at least; in their own order."""
    total = weights.sum(dtype=np.float64)
    # All that are lighter than this hold less than the rest of it together, so the likeliest are not among them.
    heavy = np.flatnonzero(weights >= (1.0 - top_p) * total / len(weights))
    order = heavy[np.argsort(-weights[heavy], kind="stable")]
    kept = int(np.searchsorted(np.cumsum(weights[order], dtype=np.float64), top_p * total)) + 1
    return np.sort(order[:kept])
