"""One rank that generates, in a process of its own: answers of another length than those of the other ranks."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist

import crossrail as xr
from crossrail.cli.child import answer_calls
from crossrail.cli.moe.model import ModelSpec
from crossrail.integrations.transformers import distribute_experts
from crossrail.moe import AllToAll, TorchGroup

_SPEC = ModelSpec(experts=4, top_k=2, hidden=32, batch=1, tokens=16)


class _Rank:
    def generate(self, rank: int, ranks: int, meeting: str) -> list[bool]:
        """Whether this rank's tokens are those of the whole model; twice, of which the second begins anew."""
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
        model = _SPEC.model()
        whole = copy.deepcopy(model)
        with (
            xr.Engine(f"rank-{rank}") as engine,
            AllToAll(
                engine, TorchGroup(), experts=_SPEC.experts, hidden=_SPEC.hidden, top_k=_SPEC.top_k,
                max_tokens=_SPEC.max_tokens, dtype="float32", scale_block=None, out_dtype="float32", timeout_s=60.0,
            ) as all_to_all,
            torch.inference_mode(),
        ):  # fmt: skip
            distribute_experts(model, all_to_all)
            same = [self._is_same(model, whole, rank, length) for length in (2 + 3 * rank, 8 - 3 * rank)]
            dist.barrier()
        dist.destroy_process_group()
        return same

    def _is_same(self, model: torch.nn.Module, whole: torch.nn.Module, rank: int, length: int) -> bool:
        prompt = _SPEC.token_ids(rank)[:, : 4 + rank]
        options = {"max_new_tokens": length, "do_sample": False, "pad_token_id": 0}
        answer = model.generate(prompt, synced_gpus=True, **options)  # type: ignore[operator]
        return torch.equal(answer, whole.generate(prompt, **options))  # type: ignore[operator]


if __name__ == "__main__":
    answer_calls({"generate": _Rank().generate})
