"""From logits to a token: greedy, or drawn from the seed and position alone, so that every node draws the same."""

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
    nothing here sorts a whole vocabulary, unless all of it is about equally likely, or adds it up one by one.
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
    if sampling.temperature != 1.0:
        with np.errstate(over="ignore"):  # a temperature of almost nothing: all but the largest become exp(-inf)
            np.divide(weights, sampling.temperature, out=weights, dtype=np.float64, casting="same_kind")
    np.exp(weights, out=weights)
    kept = _likeliest(weights, sampling.top_p) if sampling.top_p < 1.0 else None
    # In the order of tokens, not of weights: rounding moves its borders a little, but cannot exchange two tokens.
    drawn = _at_share(weights if kept is None else weights[kept], _draws.draw(sampling.seed, position))
    return drawn if kept is None else int(kept[drawn])


_BLOCK = 512


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


def _at_share(weights: npt.NDArray[np.float32], share: float) -> int:
    """The first token up to which the weights are more than this share of all of them; share: less than 1."""
    if len(weights) <= _BLOCK:
        cumulative = weights.cumsum(dtype=np.float64)
        return _first_beyond(cumulative, share * cumulative[-1])
    # The sums of blocks are vector code; one block alone is added up from token to token.
    cumulative = np.add.reduceat(weights, np.arange(0, len(weights), _BLOCK), dtype=np.float64).cumsum()
    at = share * cumulative[-1]
    block = _first_beyond(cumulative, at)
    begin = block * _BLOCK
    before = cumulative[block - 1] if block else 0.0
    return begin + _first_beyond(weights[begin : begin + _BLOCK].cumsum(dtype=np.float64), at - before)


def _first_beyond(cumulative: npt.NDArray[np.float64], at: float) -> int:
    """Where it is more than `at` first; if only rounding has made that too much, where it has all: never at a token of
    no weight.
    """
    return int(
        cumulative.searchsorted(at, side="right") if at < cumulative[-1] else cumulative.searchsorted(cumulative[-1])
    )


def _likeliest(weights: npt.NDArray[np.float32], top_p: float) -> npt.NDArray[np.intp]:
    """The fewest tokens that hold top_p of the weight, one of them at least; in their own order."""
    total = weights.sum(dtype=np.float64)
    # All that are lighter than this hold less than the rest of it together, so the likeliest are not among them.
    heavy = np.sort(weights[weights >= (1.0 - top_p) * total / len(weights)])[::-1]
    kept = int(np.searchsorted(np.cumsum(heavy, dtype=np.float64), top_p * total)) + 1
    lightest = heavy[min(kept, len(heavy)) - 1]
    tokens = np.flatnonzero(weights >= lightest)
    surplus = len(tokens) - kept
    if surplus <= 0:
        return tokens
    # Of those that are as likely as the last one that is kept, the smaller tokens.
    equal = np.flatnonzero(weights[tokens] == lightest)
    return np.delete(tokens, equal[len(equal) - surplus :])
