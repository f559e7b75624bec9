"""Hosted models that are closed at the end, and what they generate alone."""

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import pytest

from crossrail.kv.messages import Sampling
from crossrail.kv.model import Model, Tokens, generate
from tests.kv.caches import cache_of

if TYPE_CHECKING:
    from crossrail.kv.models.hosted import HostedModel

OpenModel = Callable[..., "HostedModel"]
SMALL = {"layers": "3", "hidden": "128", "pages": "128"}
_THREADS = {"threads": "1"}  # more only wait for each other on a busy machine


@pytest.fixture
def open_model(nothing_leaks: None) -> Iterator[OpenModel]:
    """A small example, or a checkpoint: name, options."""
    from crossrail.kv.models.named import open_named

    with contextlib.ExitStack() as closing:

        def open_one(name: str, **options: object) -> "HostedModel":
            given = {} if "/" in name else SMALL
            model = open_named(name, _THREADS | given | {key: str(value) for key, value in options.items()})
            closing.callback(model.close)
            return model

        yield open_one


async def alone(model: Model, prompt: Tokens, sampling: Sampling, chunk_tokens: int = 32) -> list[int]:
    """What it generates by itself, in memory of its own."""
    cache, pages = cache_of(model), np.random.default_rng(2).permutation(model.layout.pages)
    return [token async for token in generate(model, cache, prompt, pages, sampling, chunk_tokens=chunk_tokens)]
