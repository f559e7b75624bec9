"""What tests of true GPUs take of others, and a GPU that is in use already."""

import pytest
import torch

from tests.weights.conftest import make_fleet as make_fleet


@pytest.fixture(scope="session", autouse=True)
def gpu_is_in_use() -> None:
    """The driver opens some forty descriptors when a process first uses it, which are no leaks of ours."""
    torch.zeros(1, device="cuda").cpu()
    torch.empty(1, pin_memory=True)
    torch.cuda.synchronize()
