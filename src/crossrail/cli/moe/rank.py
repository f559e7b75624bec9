"""One rank of the demo: its model holds this rank's experts and reaches the others'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import crossrail as xr
from crossrail.cli.child import answer_calls
from crossrail.cli.moe.model import ModelSpec
from crossrail.integrations.transformers import distribute_experts
from crossrail.moe import AllToAll, EngineGroup

_TIMEOUT_S = 60.0


class _Rank:
    """Lifecycle: open, meet, then models one after another: share, and block and logits as often as one likes."""

    def open(self, name: str, transport: str) -> str:
        """The engine's address in hexadecimal."""
        torch.set_num_threads(1)  # all ranks share this machine's cores
        self._engine = xr.Engine(name, transport=transport)
        return self._engine.address.to_bytes().hex()

    def meet(self, addresses: list[str]) -> None:
        """addresses: of all ranks' engines, in hexadecimal, by rank."""
        self._group = EngineGroup(self._engine, [bytes.fromhex(address) for address in addresses])
        self._all_to_all: AllToAll | None = None

    def share(self, spec: dict[str, Any]) -> dict[str, int]:
        """All ranks at once. How many experts and bytes of them this rank keeps, of each layer."""
        if self._all_to_all is not None:
            self._all_to_all.close()
        self._spec = ModelSpec(**spec)
        self._all_to_all = AllToAll(
            self._engine,
            self._group,
            experts=self._spec.experts,
            hidden=self._spec.hidden,
            top_k=self._spec.top_k,
            max_tokens=self._spec.max_tokens,
            dtype=self._spec.dtype,
            scale_block=None,
            out_dtype=self._spec.dtype,
            timeout_s=_TIMEOUT_S,
        )
        self._model = self._spec.model()
        distribute_experts(self._model, self._all_to_all)
        own = self._model.model.layers[0].mlp.experts
        return {"experts": len(own.down_proj), "nbytes": sum(tensor.nbytes for tensor in own.parameters())}

    def block(self, file: str) -> None:
        """Runs one MoE block on this rank's hidden states, on all ranks at once, and saves the result to the file."""
        with torch.inference_mode():
            torch.save(self._model.model.layers[0].mlp(self._spec.hidden_states(self._group.rank)), Path(file))

    def logits(self, file: str) -> None:
        """The whole model on this rank's tokens; all ranks at once."""
        with torch.inference_mode():
            torch.save(self._model(self._spec.token_ids(self._group.rank), use_cache=False).logits, Path(file))


if __name__ == "__main__":
    this = _Rank()
    handlers = (this.open, this.meet, this.share, this.block, this.logits)
    answer_calls({handler.__name__: handler for handler in handlers})
