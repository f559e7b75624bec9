"""From logits to a token: greedy, or drawn by seed and position alone, so equal wherever it is run."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from crossrail.kv.messages import Sampling


def sample(logits: npt.NDArray[np.float32], sampling: Sampling, position: int) -> int:
    """The next token. logits: shape (vocabulary,). position: of the token to be drawn, counted from the prompt's first.

    Ties go to the smaller token. Same arguments, same token: nothing else takes part.
    """
    if sampling.temperature == 0.0:
        return int(np.argmax(logits))
    order = np.argsort(-logits, kind="stable")
    below = logits[order].astype(np.float64) - logits[order[0]]
    with np.errstate(over="ignore"):  # a temperature of almost nothing: all but the largest become exp(-inf)
        weights = np.exp(below / sampling.temperature)
    cumulative = np.cumsum(weights / weights.sum())
    # The fewest tokens that hold top_p of the probability; one of them at least.
    kept = min(int(np.searchsorted(cumulative, sampling.top_p)) + 1, len(order))
    draw = np.random.Generator(np.random.Philox(key=[sampling.seed, position])).random()
    return int(order[np.searchsorted(cumulative[:kept], draw * cumulative[kept - 1], side="right")])
