"""Trains the policy: a Qwen3-MoE of transformers in float32, in shards of FSDP2 over gloo, by REINFORCE."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.utils import logging

import crossrail as xr
from crossrail.errors import CrossrailError
from crossrail.weights.inventory.families import names_of
from crossrail.weights.inventory.memory import WeightMemory
from crossrail.weights.inventory.torch_tensors import add_tensor
from crossrail.weights.rl.task import CONFIG, PROMPT_TOKENS, Rollout

_LEARNING_RATE = 3e-3
_RATIO_MAX = 2.0  # of a token's probability here to the one it was sampled with
_MEETING_S = 300.0


class Learned(NamedTuple):
    """Results of one step, over all shards' rollouts. gap: mean distance of log probabilities from the sampler's."""

    loss: float
    gap: float


class PolicyTrainer:
    """One shard of the policy. Threads: one at a time; all but memory() are collectives of all shards.

    meeting: a file that is not there yet, by which the shards find each other. Equal seed, shards and rollouts: equal
    weights, on processors of one kind.
    """

    def __init__(self, rank: int, shards: int, meeting: Path, seed: int) -> None:
        patience = timedelta(seconds=_MEETING_S)
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=shards, timeout=patience)
        logging.disable_progress_bar()
        torch.manual_seed(seed)
        self._rank, self._shards = rank, shards
        self._model = make_model()
        mesh = init_device_mesh("cpu", (shards,))
        for layer in self._model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self._model, mesh=mesh)
        self._optimizer = torch.optim.Adam(self._model.parameters(), _LEARNING_RATE)
        self._addresses = self._shard_addresses()

    def memory(self, engine: xr.Engine) -> WeightMemory:
        """This shard's memory: it is updated in place."""
        memory, names = WeightMemory(engine, "trainer", self._rank), names_of(CONFIG)
        for name, tensor in self._model.named_parameters():
            add_tensor(memory, names, name, tensor)
        return memory

    def learn(self, rollouts: Sequence[Rollout]) -> Learned:
        """One step of policy gradient with the batch's mean reward as the baseline. rollouts: of all shards, in order.

        Tokens were sampled by other weights than ours, cast and quantised: each counts by the ratio of probabilities,
        clipped (truncated importance sampling).
        """
        rewards = torch.tensor([rollout.reward for rollout in rollouts])
        advantages = (rewards - rewards.mean()) / (rewards.std(correction=0) + 1e-6)
        share = slice(self._rank, None, self._shards)
        mine = rollouts[share]
        tokens = torch.tensor([rollout.prompt + rollout.completion for rollout in mine])
        sampled = torch.tensor([rollout.logprobs for rollout in mine])
        logits = self._model(input_ids=tokens, use_cache=False).logits[:, PROMPT_TOKENS - 1 : -1]
        logprobs = logits.log_softmax(-1).gather(-1, tokens[:, PROMPT_TOKENS:, None]).squeeze(-1)
        ratio = (logprobs.detach() - sampled).exp().clamp(max=_RATIO_MAX)
        loss = -(advantages[share, None] * ratio * logprobs).mean()
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        if self._shard_addresses() != self._addresses:
            raise CrossrailError("FSDP has moved a shard: what was registered is not what is trained")
        told = torch.stack([loss.detach(), (logprobs.detach() - sampled).abs().mean()])
        dist.all_reduce(told)
        return Learned(*(told / self._shards).tolist())

    def save(self, folder: Path) -> None:
        """The whole checkpoint, gathered, in transformers' own format."""
        whole = {name: tensor.full_tensor() for name, tensor in self._model.state_dict().items()}
        if self._rank == 0:
            self._model.save_pretrained(folder, state_dict=whole)
        dist.barrier()

    def close(self) -> None:
        """Leaves the others."""
        dist.destroy_process_group()

    def _shard_addresses(self) -> list[int]:
        return [parameter.to_local().data_ptr() for parameter in self._model.parameters()]


def make_model() -> Any:
    """A model with random weights of torch's current seed, in float32."""
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**CONFIG)).train()
