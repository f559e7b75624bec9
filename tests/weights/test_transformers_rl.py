"""The loop of `crossrail weights rl`: what serves computes what trains, the comparison sees every bit, rewards rise."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch
from transformers.utils import logging

import crossrail as xr
from crossrail.cli.weights.rl_loop import RlOptions, RlStep, run_rl
from crossrail.weights.rl.conversion import converted, float8, mismatches
from crossrail.weights.rl.policy import make_model
from crossrail.weights.rl.serving import Key, Served
from crossrail.weights.rl.task import CONFIG


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    torch.manual_seed(7)
    return make_model()


@pytest.fixture
def checkpoint(model, tmp_path: Path) -> dict[str, torch.Tensor]:
    """Of that model, in float32."""
    logging.disable_progress_bar()
    model.save_pretrained(tmp_path)
    return safetensors.torch.load_file(tmp_path / "model.safetensors")


@pytest.fixture(params=[(2, False), (1, True)], ids=["bf16 TP 2", "fp8"])
def served(request: pytest.FixtureRequest, checkpoint: dict[str, torch.Tensor]) -> Iterator[Served]:
    """An inference rank that has the checkpoint, converted."""
    with xr.Engine("inference", transport="null") as engine:
        made = Served(CONFIG, engine, 0, *request.param)
        for key, tensor in converted(checkpoint, CONFIG, made.tp, made.quantised):
            made.tensors[key].copy_(tensor)
        yield made
        made.close()


def test_fused_tensors_compute_what_transformers_does(model, served: Served) -> None:
    rounded = {name: _rounded(name, tensor, served.quantised) for name, tensor in model.state_dict().items()}
    tokens = torch.randint(CONFIG["vocab_size"], (4, 11), generator=torch.Generator().manual_seed(7))

    with torch.no_grad():
        ours = served.policy(lambda tensor: served.memory.like(tensor, served.memory.regions)).logits(tokens)
        theirs = torch.func.functional_call(model, rounded, kwargs={"input_ids": tokens, "use_cache": False}).logits

    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_one_wrong_bit_is_found(checkpoint: dict[str, torch.Tensor], served: Served) -> None:
    def found() -> list[str]:
        wanted = converted(checkpoint, CONFIG, served.tp, served.quantised)
        return mismatches(wanted, served.tensors, lambda tensor: served.memory.like(tensor, served.memory.regions))

    last = served.tp - 1
    names = [Key(last, "model.layers.1.mlp.experts.w13_weight"), Key(0, "model.norm.weight")]
    if served.quantised:
        names.append(Key(0, "model.layers.0.self_attn.qkv_proj.weight_scale_inv"))
    assert found() == []
    for key in names:
        bits = served.tensors[key].view(torch.uint8).view(-1)
        bits[-1] ^= 1
        assert found() == [f"{key.name} of rank {key.rank}"]
        bits[-1] ^= 1


@pytest.mark.parametrize(
    ("options", "complaint"),
    [({"trainers": 3}, "cannot be shared by trainers=3"), ({"steps": -1}, "steps=-1"), ({"seed": -1}, "seed=-1")],
)
def test_options_that_do_not_fit_refused(options: dict[str, int], complaint: str) -> None:
    with pytest.raises(xr.UsageError, match=complaint):
        RlOptions(**options)


@pytest.mark.slow
@pytest.mark.timeout(320)
async def test_rewards_rise_as_the_seed_says() -> None:
    learned = await _run(RlOptions(steps=7))
    again = await _run(RlOptions(steps=1))

    assert [step.version for step in learned] == list(range(1, 9))
    assert all(reward < 0.6 for reward in learned[0].rewards)
    assert all(reward > 0.8 for reward in learned[-1].rewards)
    assert all(0 < step.gap < 0.2 for step in learned[1:] if step.gap is not None)
    assert [(step.tokens, step.gap) for step in again] == [(step.tokens, step.gap) for step in learned[:2]]


async def _run(options: RlOptions) -> list[RlStep]:
    steps: list[RlStep] = []
    await run_rl(options, lambda _name, _done, _whole: None, steps.append)
    return steps


def _rounded(name: str, tensor: torch.Tensor, quantised: bool) -> torch.Tensor:
    """As it comes back from the type in which it is served."""
    if not quantised or "_proj" not in name:
        return tensor.bfloat16().float()
    values, scales = float8(tensor)
    return values.float() * scales.repeat_interleave(128, -2).repeat_interleave(128, -1)
