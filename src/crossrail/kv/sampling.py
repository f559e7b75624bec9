"""From logits to a token: greedy, or drawn from seed and position alone, so that every node draws the same."""

from __future__ import annotations

import math
import threading

import numpy as np
import numpy.typing as npt

from crossrail.errors import CrossrailError
from crossrail.kv.messages import Sampling


def sample(logits: npt.NDArray[np.float32], sampling: Sampling, position: int) -> int:
    """The next token. logits: shape (vocabulary,). position: of the token to be drawn, counted from the prompt's first.

    Ties go to the smaller token. The result depends on the arguments alone. Raises CrossrailError for logits that are
    NaN or have another shape. This runs on a decoder's event loop for each token of each request, so it must not sort a
    whole vocabulary, unless all tokens are about equally likely, nor sum it up one by one.
    """
    if np.ndim(logits) != 1 or not len(logits):
        shape = np.shape(logits)
        raise CrossrailError(f"the model's logits for position {position} have the shape {shape}, not (vocabulary,)")
    likeliest = int(logits.argmax())  # the first NaN, if there is one
    if not math.isfinite(logits[likeliest]):
        raise CrossrailError(f"the model's logits for position {position} are not numbers: {logits[likeliest]}")
    if sampling.temperature == 0.0:
        return likeliest
    weights = logits - logits[likeliest]
    if sampling.temperature != 1.0:
        with np.errstate(over="ignore"):  # a tiny temperature: all but the largest become exp(-inf)
            np.divide(weights, sampling.temperature, out=weights, dtype=np.float64, casting="same_kind")
    np.exp(weights, out=weights)
    kept = _likeliest(weights, sampling.top_p) if sampling.top_p < 1.0 else None
    # In the order of tokens, not of weights: rounding then moves the borders a little, but cannot exchange two tokens.
    drawn = _at_share(weights if kept is None else weights[kept], _draws.draw(sampling.seed, position))
    return drawn if kept is None else int(kept[drawn])


_BLOCK = 512


class _Draws(threading.local):
    """Computes `Generator(Philox(key=[seed, position])).random()`. Making these two objects for each token would take
    longer than everything else done for it, so each thread keeps one pair and sets its state.
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


def _at_share(weights: npt.NDArray[np.float32], share: float) -> int:
    """The first token at which the cumulative weight exceeds this share of the total; share: less than 1."""
    if len(weights) <= _BLOCK:
        cumulative = weights.cumsum(dtype=np.float64)
        return _first_beyond(cumulative, share * cumulative[-1])
    # Summing blocks is vector code; only the block that has the token is summed one by one.
    cumulative = np.add.reduceat(weights, np.arange(0, len(weights), _BLOCK), dtype=np.float64).cumsum()
    at = share * cumulative[-1]
    block = _first_beyond(cumulative, at)
    begin = block * _BLOCK
    before = cumulative[block - 1] if block else 0.0
    return begin + _first_beyond(weights[begin : begin + _BLOCK].cumsum(dtype=np.float64), at - before)


def _first_beyond(cumulative: npt.NDArray[np.float64], at: float) -> int:
    """The first index where the cumulative weight exceeds `at`. If rounding has made `at` too large for that, the first
    with the full weight: never a token of weight 0.
    """
    return int(
        cumulative.searchsorted(at, side="right") if at < cumulative[-1] else cumulative.searchsorted(cumulative[-1])
    )


def _likeliest(weights: npt.NDArray[np.float32], top_p: float) -> npt.NDArray[np.intp]:
    """The fewest tokens that hold top_p of the weight, at least one; in token order."""
    total = weights.sum(dtype=np.float64)
    # All tokens lighter than this hold less than the remaining 1 - top_p together, so none of the likeliest is among
    # them.
    heavy = np.sort(weights[weights >= (1.0 - top_p) * total / len(weights)])[::-1]
    kept = int(np.searchsorted(np.cumsum(heavy, dtype=np.float64), top_p * total)) + 1
    lightest = heavy[min(kept, len(heavy)) - 1]
    tokens = np.flatnonzero(weights >= lightest)
    surplus = len(tokens) - kept
    if surplus <= 0:
        return tokens
    # Of the tokens as likely as the last one kept, keep those with the smaller numbers.
    equal = np.flatnonzero(weights[tokens] == lightest)
    return np.delete(tokens, equal[len(equal) - surplus :])
