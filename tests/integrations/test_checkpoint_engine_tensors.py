"""What may be registered with crossrail.integrations.checkpoint_engine's server, with the real package."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import checkpoint_engine.pin_memory
import checkpoint_engine.ps
import pytest
import torch

import crossrail as xr
from crossrail.integrations.checkpoint_engine import P2PStore, cpu, server
from crossrail.integrations.checkpoint_engine.cpu import CpuDeviceManager
from crossrail.integrations.checkpoint_engine.delivery import Bucket, Delivery


@pytest.fixture
def server_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[server.ParameterServer]:
    """Like the constructor's in a group of one rank, as far as registering goes."""
    monkeypatch.setenv("CROSSRAIL_SECRET", "of this test")
    monkeypatch.setattr(CpuDeviceManager.device_module, "device_count", lambda: 1)
    monkeypatch.setattr(checkpoint_engine.pin_memory, "torch", cpu._Unpinned())
    made = server.ParameterServer.__new__(server.ParameterServer)
    made._rank, made.device_manager = 0, CpuDeviceManager()
    made._memory_pool = {made.shared_memory_pool_name: []}
    made._current_shared_memory_pool_user = ""
    made._opened = made._p2p_store = P2PStore(CpuDeviceManager(), rank=0)
    yield made
    made._opened.close()


@pytest.mark.parametrize(
    ("tensor", "complaint"),
    [
        (
            torch.ones(3, 4).t(),
            r"'w': its bytes cannot be copied as they lie, shape \(4, 3\): .*Next: register a dense",
        ),
        (torch.ones(20)[::2], r"'w': its bytes cannot be copied as they lie, shape \(10,\)"),
        (torch._neg_view(torch.ones(4)), "'w': its bytes cannot be copied as they lie"),
        (torch.eye(3).to_sparse(), "'w': its bytes cannot be copied as they lie"),
        (torch.empty(3, device="meta"), "'w': the tensor is on the device meta, and has no values"),
        ([1.0], "'w': a list is no torch tensor"),
        (torch.empty(0, 3), "no tensor of checkpoint 'odd' has any elements here"),
    ],
)
def test_tensor_that_cannot_be_copied_is_refused_by_name(
    server_alone: server.ParameterServer, tensor: Any, complaint: str
) -> None:
    with pytest.raises(xr.UsageError, match=complaint):
        server_alone.register_checkpoint("odd", named_tensors={"w": tensor})

    server_alone.register_checkpoint("odd", named_tensors={"w": torch.ones(3), "bytes": torch.ones(4).byte()[::2]})
    assert server_alone._descriptors("odd") != [b""]


def test_why_registering_failed_is_not_hidden_by_undoing_it(
    server_alone: server.ParameterServer, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="unsupported file format"):
        server_alone.register_checkpoint("odd", files=[str(tmp_path / "model.bin")])


def test_second_half_of_the_buffer_is_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that are pinned where they are have tensors of any length."""
    monkeypatch.setattr(checkpoint_engine.ps, "reduce_tensor", lambda tensor: None)
    device = SimpleNamespace(device_type="cpu", device_module=SimpleNamespace(synchronize=lambda: None))
    store: Any = SimpleNamespace(engine=SimpleNamespace(register=lambda tensor, access: None))

    delivery = Delivery(store, device, {}, [Bucket(0, SimpleNamespace(size=nbytes)) for nbytes in (6, 258)])

    assert delivery._half_bytes == 512
