"""Memory of a model's layout, of its own and full of zeros."""

import numpy as np

from crossrail.kv.model import Cache, Model


def cache_of(model: Model) -> Cache:
    layout = model.layout
    return [
        [layout.layer_view(np.zeros(layout.layer_bytes, np.uint8)) for _ in range(layout.layers)]
        for _ in range(layout.tp)
    ]
