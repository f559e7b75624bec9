"""`ParameterServer` of checkpoint-engine with its weights over crossrail: docs/weights-checkpoint-engine.md.

from crossrail.integrations.checkpoint_engine import ParameterServer   # instead of: from checkpoint_engine.ps

ps = ParameterServer(rank=rank, world_size=world_size)
ps.register_checkpoint(name, files=files)
ps.gather_metas(name)
ps.update(name, req_func)

server.py: the class, a subclass of theirs          store.py: their P2PStore over an engine; reads of pinned memory
  meeting.py: what ranks say to each other, by         place.py: where a rank's memory is, as a line of text
    the store of torch.distributed that theirs has
  delivery.py: one rank's update, bucket by bucket   cpu.py: the CPU in the place of a GPU, for trying it out
    worker.py: the engine's worker, by their ZeroMQ  versions.py: whether the installed one is what we know
    protocol
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from crossrail._extras import needs
from crossrail.integrations.checkpoint_engine.errors import CheckpointUpdateFailed

if TYPE_CHECKING:
    from crossrail.integrations.checkpoint_engine.cpu import use_cpu
    from crossrail.integrations.checkpoint_engine.server import ParameterServer
    from crossrail.integrations.checkpoint_engine.store import P2PStore

__all__ = ["CheckpointUpdateFailed", "P2PStore", "ParameterServer", "use_cpu"]

_MODULES = {"P2PStore": "store", "ParameterServer": "server", "use_cpu": "cpu"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with needs(f"{__name__}.{name}", "'crossrail[checkpoint-engine]'"):
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
