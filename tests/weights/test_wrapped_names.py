"""Names of parameters as wrappers of modules make them."""

from __future__ import annotations

import pytest

from crossrail.errors import UsageError
from crossrail.weights.inventory.families import names_of
from crossrail.weights.inventory.mapping import Names, Part, Rule
from tests.weights.test_mapping import QWEN3_MOE

Q = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    "name",
    [
        f"_orig_mod.{Q}",
        f"module.{Q}",
        f"module._orig_mod.{Q}",
        f"_fsdp_wrapped_module.{Q}",
        "model.layers.0._checkpoint_wrapped_module.self_attn._fsdp_wrapped_module.q_proj.weight",
    ],
)
def test_wrappers_that_leave_parameters_as_they_are_may_stay_in_names(name: str) -> None:
    names = names_of(QWEN3_MOE)

    (held,) = names.holdings(name, "bfloat16", (32, 32), 0, 0)

    assert held.name == Q


@pytest.mark.parametrize(
    ("name", "box"),
    [
        ("module.model.layers.0.mlp.experts._orig_mod.gate_up_proj", ((0, 8), (0, 16), (0, 32))),
        ("model.layers.0.mlp.experts._orig_mod.3.up_proj.weight", ((3, 4), (0, 16), (0, 32))),
    ],
)
def test_wrapped_experts_and_scales_are_found_by_their_rules(name: str, box: tuple[tuple[int, int], ...]) -> None:
    shape = (8, 32, 32) if "gate_up" in name else (16, 32)

    held = names_of(QWEN3_MOE).holdings(name, "bfloat16", shape, 0, 0)

    assert held[-1].name == "model.layers.0.mlp.experts.up_proj.weight"
    assert held[-1].box == box


def test_name_that_the_model_has_keeps_what_looks_like_a_wrapper() -> None:
    names = Names([Rule("_orig_mod.b", (Part("c"),))], {"module.a": (2,), "a": (3,), "b": (4,), "c": (5,)})

    assert [held.name for held in names.holdings("module.a", "float32", (2,), 0, 0)] == ["module.a"]
    assert [held.name for held in names.holdings("_orig_mod.b", "float32", (5,), 0, 0)] == ["c"]
    assert [held.name for held in names.holdings("module._orig_mod.b", "float32", (4,), 0, 0)] == ["b"]


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        (f"base_model.model.{Q}", f": there is '{Q}'. Merge peft's adapters, and leave out what it put into the name"),
        (f"base_model.model.{Q[:-7]}.base_layer.weight", f": there is '{Q}'. Merge peft's adapters"),
        (f"base_model.model.{Q[:-7]}.lora_A.default.weight", ": it is an adapter of peft's. Merge it"),
        (Q.replace("q_proj", "k_poj"), f": there is '{Q.replace('q_proj', 'k_proj')}'"),
    ],
)
def test_name_that_the_model_does_not_have_is_refused_with_one_that_was_probably_meant(name: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        names_of(QWEN3_MOE).holdings(name, "bfloat16", (32, 32), 0, 0)

    assert hint in str(caught.value)
