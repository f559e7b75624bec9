"""Between numpy's arrays of the contract and torch's tensors. Imports torch, so it is for test_torch_*.py alone."""

from typing import Any

import numpy as np
import torch

from tests.moe.kernels.numbers import Array


def to_torch(array: Array) -> Any:
    """A copy; uint16 becomes bfloat16."""
    if array.dtype == np.uint16:
        return torch.from_numpy(np.array(array.view(np.int16))).view(torch.bfloat16)
    return torch.from_numpy(np.array(array))


def to_numpy(tensor: Any) -> Array:
    """The way back."""
    if tensor.dtype == torch.bfloat16:
        bits: Array = tensor.view(torch.int16).numpy().view(np.uint16)
        return bits
    values: Array = tensor.numpy()
    return values
