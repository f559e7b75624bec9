"""A real GPU, for the conftest.py of folders whose tests need one."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def gpu_is_in_use() -> None:
    """The driver opens pipes, sockets and eventfds when a process first uses it, which are no leaks of ours."""
    import torch

    torch.zeros(1, device="cuda").cpu()
    torch.empty(1, pin_memory=True)
    torch.cuda.synchronize()
