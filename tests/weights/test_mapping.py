"""Rules against arrays: what a framework's tensor is filled with from the checkpoint is where the holdings say."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
import pytest

from crossrail.errors import UsageError
from crossrail.weights import Holding, Inventory, RegionInfo, make_plan
from crossrail.weights.inventory.families import names_of
from crossrail.weights.inventory.mapping import Names, Part, Ranks, Rule

LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "intermediate_size": 48,
}
QWEN3_MOE = LLAMA | {"model_type": "qwen3_moe", "num_experts": 8, "moe_intermediate_size": 16}
DEEPSEEK = LLAMA | {
    "model_type": "deepseek_v3",
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
KIMI_K2 = DEEPSEEK | {"model_type": "kimi_k2", "n_shared_experts": 2}
QWEN2 = LLAMA | {"model_type": "qwen2"}
LAYER = "model.layers.1"


def checkpoint(names: Names) -> dict[str, np.ndarray]:
    """Parameters of which every element is another number."""
    arrays, first = {}, 0
    for name, shape in names.shapes.items():
        count = int(np.prod(shape))
        arrays[name] = np.arange(first, first + count, dtype=np.float32).reshape(shape)
        first += count
    return arrays


def filled(holdings: Sequence[Holding], shape: tuple[int, ...], whole: dict[str, np.ndarray]) -> np.ndarray:
    """A tensor of this shape written through the holdings; what none covers is NaN."""
    tensor = np.full(shape, np.nan, np.float32)
    for held in holdings:
        extent = [stop - start for start, stop in held.box]
        view = np.ndarray(extent, np.float32, tensor, held.offset, held.strides)
        assert np.isnan(view).all(), f"{held.name} lies on another"
        view[...] = whole[held.name][tuple(slice(*piece) for piece in held.box)]
    return tensor


def rows(array: np.ndarray, rank: int, count: int) -> np.ndarray:
    return np.split(array, count)[rank]


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_fused_qkv_of_tensor_parallelism(tp: int) -> None:
    names = names_of(LLAMA)
    whole = checkpoint(names)
    q, k, v = (whole[f"{LAYER}.self_attn.{part}_proj.weight"] for part in "qkv")
    for rank in range(tp):
        # Two heads of k and v: of four ranks two have the same.
        kv = min(tp, 2)
        wanted = np.concatenate([rows(q, rank, tp), *(rows(one, rank * kv // tp, kv) for one in (k, v))])
        ranks = Ranks(tp_rank=rank, tp=tp)

        held = names.holdings(f"{LAYER}.self_attn.qkv_proj.weight", "float32", wanted.shape, 0, 0, ranks=ranks)

        np.testing.assert_array_equal(filled(held, wanted.shape, whole), wanted)


@pytest.mark.parametrize(("name", "axis"), [("mlp.down_proj", 1), ("self_attn.o_proj", 1), ("mlp.gate_proj", 0)])
def test_rows_and_columns_of_tensor_parallelism(name: str, axis: int) -> None:
    names = names_of(LLAMA)
    whole = checkpoint(names)
    for rank in range(2):
        wanted = np.split(whole[f"{LAYER}.{name}.weight"], 2, axis)[rank]

        held = names.holdings(f"{LAYER}.{name}.weight", "float32", wanted.shape, 0, 0, ranks=Ranks(rank, 2))

        np.testing.assert_array_equal(filled(held, wanted.shape, whole), wanted)


@pytest.mark.parametrize("config", [DEEPSEEK, KIMI_K2])
def test_latent_attention_of_tensor_parallelism(config: dict[str, Any]) -> None:
    names = names_of(config)
    whole = checkpoint(names)
    attention = f"{LAYER}.self_attn"
    q_a, kv_a, q_b, kv_b, out = (
        whole[f"{attention}.{part}.weight"]
        for part in ("q_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "kv_b_proj", "o_proj")
    )
    for rank in range(2):
        for name, wanted in (
            ("fused_qkv_a_proj", np.concatenate([q_a, kv_a])),  # what precedes the heads is at every rank
            ("q_a_proj", q_a),
            ("kv_a_proj_with_mqa", kv_a),
            ("q_b_proj", rows(q_b, rank, 2)),
            ("kv_b_proj", rows(kv_b, rank, 2)),
            ("o_proj", np.split(out, 2, 1)[rank]),
        ):
            held = names.holdings(f"{attention}.{name}.weight", "float32", wanted.shape, 0, 0, ranks=Ranks(rank, 2))
            np.testing.assert_array_equal(filled(held, wanted.shape, whole), wanted, name)


def test_latent_attention_with_queries_that_have_no_latent() -> None:
    """As of Moonlight: a DeepSeek-V3 with "q_lora_rank": null."""
    names = names_of(DEEPSEEK | {"q_lora_rank": None, "attention_bias": True})
    whole = checkpoint(names)
    attention = f"{LAYER}.self_attn"
    assert not [name for name in names.shapes if ".q_a" in name or ".q_b" in name]
    assert f"{attention}.q_proj.bias" not in names.shapes
    for rank in range(2):
        wanted = rows(whole[f"{attention}.q_proj.weight"], rank, 2)
        assert wanted.shape == (4 * (8 + 4) // 2, 32)
        held = names.holdings(f"{attention}.q_proj.weight", "float32", wanted.shape, 0, 0, ranks=Ranks(rank, 2))
        np.testing.assert_array_equal(filled(held, wanted.shape, whole), wanted)


@pytest.mark.parametrize("config", [DEEPSEEK, KIMI_K2])
def test_shared_experts_are_divided_as_a_dense_block(config: dict[str, Any]) -> None:
    names = names_of(config)
    whole = checkpoint(names)
    for of in (f"{LAYER}.mlp.shared_experts", "model.layers.0.mlp"):
        gate, up, down = (whole[f"{of}.{part}_proj.weight"] for part in ("gate", "up", "down"))
        for rank in range(2):
            # Expert parallelism does not divide what every token goes through.
            ranks = Ranks(tp_rank=rank, tp=2, ep_rank=rank, ep=2)
            for name, wanted in (
                ("gate_up_proj", np.concatenate([rows(gate, rank, 2), rows(up, rank, 2)])),
                ("down_proj", np.split(down, 2, 1)[rank]),
            ):
                held = names.holdings(f"{of}.{name}.weight", "float32", wanted.shape, 0, 0, ranks=ranks)
                np.testing.assert_array_equal(filled(held, wanted.shape, whole), wanted)


@pytest.mark.parametrize(
    ("more", "dense"),
    [
        ({"mlp_only_layers": [1, 3]}, [1, 3]),
        ({"decoder_sparse_step": 2}, [0, 2]),
        ({"mlp_only_layers": [3], "decoder_sparse_step": 2}, [0, 2, 3]),
        ({"mlp_only_layers": []}, []),
    ],
)
def test_layers_without_experts_have_a_dense_block(more: dict[str, Any], dense: list[int]) -> None:
    names = names_of(QWEN3_MOE | {"num_hidden_layers": 4} | more)
    for layer in range(4):
        of = f"model.layers.{layer}.mlp"
        assert (f"{of}.down_proj.weight" in names.shapes) == (layer in dense)
        assert (f"{of}.experts.down_proj.weight" in names.shapes) == (layer not in dense)
    for layer in dense:
        assert names.holdings(f"model.layers.{layer}.mlp.down_proj.weight", "float32", (32, 48), 0, 0)


@pytest.mark.parametrize(
    ("config", "biased"),
    [
        (QWEN2, "q k v"),
        (LLAMA, ""),
        (LLAMA | {"attention_bias": True}, "q k v o"),
        (QWEN3_MOE | {"attention_bias": True}, "q k v o"),
    ],
)
def test_biases_are_divided_with_their_projections(config: dict[str, Any], biased: str) -> None:
    names = names_of(config)
    whole = checkpoint(names)
    attention = f"{LAYER}.self_attn"
    assert [name for name in names.shapes if name.startswith(LAYER) and name.endswith("bias")] == [
        f"{attention}.{part}_proj.bias" for part in biased.split()
    ]
    for rank in range(2):
        ranks = Ranks(rank, 2)
        if "q" in biased:
            wanted = np.concatenate([rows(whole[f"{attention}.{part}_proj.bias"], rank, 2) for part in "qkv"])
            held = names.holdings(f"{attention}.qkv_proj.bias", "float32", wanted.shape, 0, 0, ranks=ranks)
            np.testing.assert_array_equal(filled(held, wanted.shape, whole), wanted)
        if "o" in biased:  # added to the sum of all ranks, so each has all of it
            wanted = whole[f"{attention}.o_proj.bias"]
            held = names.holdings(f"{attention}.o_proj.bias", "float32", wanted.shape, 0, 0, ranks=ranks)
            np.testing.assert_array_equal(filled(held, wanted.shape, whole), wanted)


def test_biases_of_latent_attention_and_of_dense_blocks() -> None:
    latent = {name for name in names_of(DEEPSEEK | {"attention_bias": True}).shapes if name.endswith(".bias")}
    assert {name.removeprefix(f"{LAYER}.self_attn.") for name in latent if LAYER in name} == {
        "q_a_proj.bias",
        "kv_a_proj_with_mqa.bias",
        "o_proj.bias",
    }
    names = names_of(LLAMA | {"mlp_bias": True})
    assert names.holdings(f"{LAYER}.mlp.gate_up_proj.bias", "float32", (48,), 0, 0, ranks=Ranks(1, 2))
    assert names.holdings(f"{LAYER}.mlp.down_proj.bias", "float32", (32,), 0, 0, ranks=Ranks(1, 2))


@pytest.mark.parametrize("infix", ["", ".routed_experts"])
@pytest.mark.parametrize("config", [QWEN3_MOE, DEEPSEEK, KIMI_K2])
def test_stacked_experts_of_expert_and_tensor_parallelism(config: dict[str, Any], infix: str) -> None:
    names = names_of(config)
    whole = checkpoint(names)
    gate, up, down = (whole[f"{LAYER}.mlp.experts.{part}_proj.weight"] for part in ("gate", "up", "down"))
    for rank in range(2):
        for ranks, w13, w2 in (
            (Ranks(ep_rank=rank, ep=2), [rows(gate, rank, 2), rows(up, rank, 2)], rows(down, rank, 2)),
            (
                Ranks(tp_rank=rank, tp=2),
                [np.split(gate, 2, 1)[rank], np.split(up, 2, 1)[rank]],
                np.split(down, 2, 2)[rank],
            ),
        ):
            for name, wanted in (("w13_weight", np.concatenate(w13, axis=1)), ("w2_weight", w2)):
                full = f"{LAYER}.mlp.experts{infix}.{name}"
                held = names.holdings(full, "float32", wanted.shape, 0, 0, ranks=ranks)
                np.testing.assert_array_equal(filled(held, wanted.shape, whole), wanted)


@pytest.mark.parametrize("rank", [0, 1])
def test_stacked_experts_that_are_named(rank: int) -> None:
    """Of which each is divided by tensor parallelism, as everything else is."""
    names = names_of(QWEN3_MOE)
    whole = checkpoint(names)
    gate, up = (whole[f"{LAYER}.mlp.experts.{part}_proj.weight"][5:8] for part in ("gate", "up"))
    wanted = np.concatenate([np.split(gate, 2, 1)[rank], np.split(up, 2, 1)[rank]], axis=1)

    ranks = Ranks(rank, 2, experts=(5, 8))
    held = names.holdings(f"{LAYER}.mlp.experts.w13_weight", "float32", wanted.shape, 0, 0, ranks=ranks)

    np.testing.assert_array_equal(filled(held, wanted.shape, whole), wanted)


@pytest.mark.parametrize("experts", [(5, 9), (3, 3), (-1, 2)])
def test_experts_that_are_none_are_refused(experts: tuple[int, int]) -> None:
    with pytest.raises(UsageError, match="has 8 experts, there are no numbers"):
        names_of(QWEN3_MOE).holdings(
            f"{LAYER}.mlp.experts.w2_weight", "float32", (1, 32, 16), 0, 0, ranks=Ranks(experts=experts)
        )
    with pytest.raises(UsageError, match=r"experts=\(0, 4\) are named and ep=2"):
        Ranks(ep=2, experts=(0, 4))


def test_experts_by_the_name_that_transformers_5_gives_their_number() -> None:
    config = {name: value for name, value in QWEN3_MOE.items() if name != "num_experts"}
    assert names_of(config | {"num_local_experts": 8}).shapes == names_of(QWEN3_MOE).shapes
    with pytest.raises(UsageError, match="a qwen3_moe model has no 'num_local_experts'"):
        names_of(config)


def test_trainers_shard_of_a_fused_tensor_is_cut_where_its_parts_end() -> None:
    names = names_of(QWEN3_MOE)
    whole = checkpoint(names)
    gate, up = (whole[f"{LAYER}.mlp.experts.{part}_proj.weight"] for part in ("gate", "up"))
    fused = np.concatenate([gate, up], axis=1)
    box = ((2, 5), (10, 25), (0, 32))

    held = names.holdings(f"{LAYER}.mlp.experts.gate_up_proj", "float32", fused.shape, 0, 0, box=box, mesh="fsdp")

    assert {one.mesh for one in held} == {"fsdp"}
    np.testing.assert_array_equal(filled(held, (3, 15, 32), whole), fused[2:5, 10:25])


def test_single_expert_is_one_of_the_stack() -> None:
    names = names_of(QWEN3_MOE)
    whole = checkpoint(names)
    wanted = whole[f"{LAYER}.mlp.experts.down_proj.weight"][5]

    held = names.holdings(f"{LAYER}.mlp.experts.5.down_proj.weight", "float32", wanted.shape, 0, 0)

    assert [one.box for one in held] == [((5, 6), (0, 32), (0, 16))]
    np.testing.assert_array_equal(filled(held, wanted.shape, whole), wanted)


@pytest.mark.parametrize("rank", [0, 1])
def test_scales_of_a_fused_tensor_count_blocks(rank: int) -> None:
    names = names_of(QWEN3_MOE | {"quantization_config": {"weight_block_size": [4, 8]}})

    held = names.holdings(
        f"{LAYER}.mlp.experts.w13_weight_scale_inv", "float32", (4, 8, 4), 0, 0, ranks=Ranks(ep_rank=rank, ep=2)
    )

    gate, up = (f"{LAYER}.mlp.experts.{part}_proj.weight" for part in ("gate", "up"))
    experts = (4 * rank, 4 * rank + 4)
    assert [(one.scale_of, one.block, one.shape, one.box, one.offset) for one in held] == [
        (gate, (1, 4, 8), (8, 4, 4), (experts, (0, 4), (0, 4)), 0),
        (up, (1, 4, 8), (8, 4, 4), (experts, (0, 4), (0, 4)), 4 * 4 * 4),
    ]


@pytest.mark.parametrize("name", ["w13_weight", "w2_weight"])
@pytest.mark.parametrize("rank", range(4))
def test_scales_of_ranks_that_divide_a_block_are_refused(name: str, rank: int) -> None:
    config = {**QWEN3_MOE, "moe_intermediate_size": 768, "hidden_size": 256}
    names = names_of(config)
    full = f"{LAYER}.mlp.experts.{name}_scale_inv"
    count = names.shapes[f"{LAYER}.mlp.experts.gate_proj.weight"][0]
    for tp, refused in ((4, True), (3, False), (2, False), (1, False)):
        if rank >= tp:
            continue
        shape = (count, 2 * (768 // tp // 128), 2) if name == "w13_weight" else (count, 2, 768 // tp // 128)
        if refused:
            why = f"this rank has {192 * rank}:{192 * rank + 192} of the 768 of dimension . of .*blocks of 128"
            with pytest.raises(UsageError, match=why):
                names.holdings(full, "float32", shape, 0, 0, ranks=Ranks(tp_rank=rank, tp=tp))
        else:
            assert names.holdings(full, "float32", shape, 0, 0, ranks=Ranks(tp_rank=rank, tp=tp))


def test_last_block_of_scales_may_be_short() -> None:
    names = Names([Rule("w", (Part("w", 0),))], {"w": (300, 100)})
    assert names.holdings("w_scale_inv", "float32", (3, 1), 0, 0)
    with pytest.raises(
        UsageError, match=r"has 150:300 of the 300 of dimension 0 of 'w', which is not in whole fp8 blo"
    ):
        names.holdings("w_scale_inv", "float32", (2, 1), 0, 0, ranks=Ranks(1, 2))


def test_scale_of_a_number_is_one() -> None:
    names = Names([], {"gate": (), "row": (9,)}, block=(4, 8))

    (gate,) = names.holdings("gate_scale_inv", "float32", (), 0, 0)
    (row,) = names.holdings("row_scale_inv", "float32", (2,), 0, 0)

    assert (gate.scale_of, gate.block, gate.shape, gate.box) == ("gate", (), (), ())
    assert (row.scale_of, row.block, row.shape) == ("row", (8,), (2,))


def test_tied_embeddings_are_one_parameter() -> None:
    assert "lm_head.weight" in names_of(LLAMA).shapes
    assert "lm_head.weight" not in names_of(LLAMA | {"tie_word_embeddings": True}).shapes


@pytest.mark.parametrize(
    ("name", "shape", "ranks", "text"),
    [
        (f"{LAYER}.self_attn.qkv_proj.weight", (64, 31), Ranks(), r"'model.layers.1.*must be \(64, 32\)"),
        (f"{LAYER}.self_attn.qkv_proj.weight", (64, 32), Ranks(0, 3), "cannot be divided by 3"),
        (f"{LAYER}.self_attn.rotary", (1,), Ranks(), "no parameter"),
        ("model.layers.7.mlp.down_proj.weight", (32, 48), Ranks(), "no parameter 'model.layers.7"),
    ],
)
def test_tensor_that_is_not_the_models_refused(name: str, shape: tuple[int, ...], ranks: Ranks, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        names_of(LLAMA).holdings(name, "float32", shape, 0, 0, ranks=ranks)


def test_expert_that_is_none_refused() -> None:
    with pytest.raises(UsageError, match="8 experts, there is no number 8"):
        names_of(QWEN3_MOE).holdings(f"{LAYER}.mlp.experts.8.down_proj.weight", "float32", (32, 16), 0, 0)


@pytest.mark.parametrize(
    ("config", "text"), [({"model_type": "bloom"}, "bloom"), ({"model_type": "llama"}, "num_attention_heads")]
)
def test_configuration_that_does_not_fit_refused(config: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        names_of(config)


def test_rank_that_is_none_refused() -> None:
    with pytest.raises(UsageError, match="tp_rank=2"):
        Ranks(tp_rank=2, tp=2)


def test_own_rules_for_an_own_framework() -> None:
    names = Names(
        [Rule("blk.{n}.ab", (Part("layer.{n}.a"), Part("layer.{n}.b")), along=1)],
        {"layer.3.a": (2, 3), "layer.3.b": (2, 5)},
    )

    held = names.holdings("blk.3.ab", "float32", (2, 8), 0, 0)

    assert [(one.name, one.box, one.offset, one.strides) for one in held] == [
        ("layer.3.a", ((0, 2), (0, 3)), 0, (32, 4)),
        ("layer.3.b", ((0, 2), (0, 5)), 12, (32, 4)),
    ]


Q, TALL, WIDE = Part("q", 0), Part("tall", 0), Part("wide", 1)


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        ("blk", "'blk' is no Rule: rules are a sequence of them"),
        (Rule("blk.{n}.q", (Part("{m}.q", 0),)), r"rule 'blk.{n}.q': {m} in '{m}.q': the pattern has no such field"),
        (Rule("e.{expert}.q", (Part("e.{expert}.q", 0),)), r"{expert} in 'e.{expert}.q': parts are of all experts"),
        (Rule("blk.{n}.{n}", (Q,)), r"{n} is in it twice"),
        (Rule("blk.{0}", (Q,)), r"'blk.{0}': a field must be a word in braces, such as {layer}"),
        (Rule("blk.{n", (Q,)), r"rule 'blk.{n': 'blk.{n': "),
        (Rule("blk", cast("Any", Q)), r"parts must be one Part or more, in a tuple such as (Part('q', 0),)"),
        (Rule("blk", cast("Any", ("q",))), "parts must be one Part or more"),
        (Rule("blk", ()), "parts must be one Part or more"),
        (Rule("blk", (Part("q", -1),)), "split of 'q' is -1, must be 0 or more, or None"),
        (Rule("blk", (Q,), along=-1), "along is -1, must be 0 or more"),
    ],
    ids=str,
)
def test_rule_that_cannot_be_meant_so_refused(rule: Rule, text: str) -> None:
    with pytest.raises(UsageError, match=re.escape(text)):
        Names([rule], {"q": (8, 4)}, {"heads": 4})


def test_units_that_are_not_known_refused() -> None:
    names = Names([Rule("blk", (Part("q", 0, "head"),))], {"q": (8, 4)}, {"heads": 4})

    with pytest.raises(UsageError, match="'q' is divided by 'head', and units of these Names has 'heads'"):
        names.holdings("blk", "float32", (8, 4), region=0, offset=0)


@pytest.mark.parametrize(
    ("rule", "tp", "text"),
    [
        (Rule("blk", (Q, TALL), along=1), 1, "do not fit one behind the other along dimension 1: 8 x 4 and 16 x 4 are"),
        (Rule("blk", (Q, WIDE)), 2, "'q' of (8, 4) and 'wide' of (8, 4) do not fit one behind the other along"),
        (Rule("blk", (Q, Part("bias"))), 1, "do not fit one behind the other along dimension 0: 8 x 4 and 8 are here"),
        (Rule("blk", (Q, WIDE), along=2), 1, "'q' has no dimension 2, along which the parts lie"),
    ],
)
def test_parts_that_do_not_fit_one_behind_the_other_refused(rule: Rule, tp: int, text: str) -> None:
    """Else their bytes would be taken from beside where they are."""
    names = Names([rule], {"q": (8, 4), "tall": (16, 4), "wide": (8, 4), "bias": (8,)})

    with pytest.raises(UsageError, match=re.escape(text)):
        names.holdings("blk", "float32", (16, 4), region=0, offset=0, ranks=Ranks(0, tp))


def test_braces_in_a_name_without_a_rule_are_part_of_it() -> None:
    shapes = dict.fromkeys(("blocks{}.w", "blocks.{n}", "a{", "b}}"), (2, 3))

    for name in shapes:
        (held,) = Names([], shapes).holdings(name, "float32", (2, 3), 0, 0)
        assert held.name == name
    with pytest.raises(UsageError, match=r"'c\{\}': no rule fits it, and the model has no parameter 'c\{\}'"):
        Names([], shapes).holdings("c{}", "float32", (2, 3), 0, 0)


# --- from a trainer's names to an inference rank's ---


def tensors(names: Names, of: Sequence[tuple[str, tuple[int, ...]]], **more: Any) -> tuple[list[Holding], int]:
    held: list[Holding] = []
    offset = 0
    for name, shape in of:
        held += names.holdings(name, "bfloat16", shape, 0, offset, **more)
        offset += 2 * int(np.prod(shape))
    return held, offset


def vllm_tensors(tp: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "model.embed_tokens.weight", (64 // tp, 32)
    yield "lm_head.weight", (64 // tp, 32)
    yield "model.norm.weight", (32,)
    for layer in range(2):
        of = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{of}.{norm}.weight", (32,)
        yield f"{of}.self_attn.qkv_proj.weight", (64 // tp, 32)
        yield f"{of}.self_attn.o_proj.weight", (32, 32 // tp)
        for norm in ("q_norm", "k_norm"):
            yield f"{of}.self_attn.{norm}.weight", (8,)
        yield f"{of}.mlp.gate.weight", (8, 32)
        yield f"{of}.mlp.experts.w13_weight", (8, 32 // tp, 32)
        yield f"{of}.mlp.experts.w2_weight", (8, 32, 16 // tp)


def test_checkpoint_names_at_the_trainer_and_fused_ones_at_the_targets_make_a_plan() -> None:
    names = names_of(QWEN3_MOE)
    own, nbytes = tensors(names, list(names.shapes.items()))
    trainer = Inventory.of("trainer", 0, [RegionInfo(b"", nbytes)], own)
    targets = []
    for rank in range(2):
        held, target_bytes = tensors(names, list(vllm_tensors(tp=2)), ranks=Ranks(rank, 2))
        targets.append(Inventory.of("target", rank, [RegionInfo(b"", target_bytes)], held))

    plan = make_plan([trainer], targets)

    assert {param.name for param in plan.params} == set(names.shapes)
    assert plan.writes["nbytes"][plan.writes["target"] == 0].sum() == target_bytes


def test_null_in_a_configuration_is_as_if_it_were_not_there() -> None:
    nulls = {"num_key_value_heads": None, "head_dim": None, "quantization_config": None, "tie_word_embeddings": None}
    shapes = names_of(LLAMA | nulls).shapes
    assert shapes["model.layers.0.self_attn.k_proj.weight"] == (32, 32)
    names_of(QWEN3_MOE | {"quantization_config": {"weight_block_size": None}})


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (DEEPSEEK | {"kv_lora_rank": None}, "a deepseek_v3 model has no 'kv_lora_rank'"),
        ({key: DEEPSEEK[key] for key in DEEPSEEK if key != "q_lora_rank"}, "a deepseek_v3 model has no 'q_lora_rank'"),
        (object(), r"the configuration is a object, must be config.json as a mapping. Next: the to_dict\(\) of trans"),
        (
            LLAMA | {"model_type": "gemma2"},
            r"model_type 'gemma2' has no rules here, .*Next: Names\(\) with rules of your",
        ),
        (LLAMA | {"num_attention_heads": 0}, "a llama model: num_attention_heads is 0, must be a whole number, 1 or"),
        (LLAMA | {"hidden_size": "32"}, "hidden_size is '32', must be"),
        (QWEN3_MOE | {"mlp_only_layers": 3}, "a qwen3_moe model: mlp_only_layers is '3', must be a list of layers"),
        (QWEN3_MOE | {"mlp_only_layers": [-1]}, "mlp_only_layers is -1, must be a whole number, 0 or more"),
        (DEEPSEEK | {"first_k_dense_replace": -1}, "first_k_dense_replace is -1, must be a whole number, 0 or more"),
    ],
)
def test_configuration_that_is_none_is_refused(config: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        names_of(config)


def test_expert_that_is_no_number_is_refused() -> None:
    name = f"{LAYER}.mlp.experts.shared.gate_proj.weight"
    with pytest.raises(UsageError, match="'shared' stands where the number of an expert should"):
        names_of(QWEN3_MOE).holdings(name, "float32", (16, 32), 0, 0)


@pytest.mark.parametrize(
    ("quantised", "text"),
    [
        ("fp8", "quantization_config is 'fp8', must be a mapping"),
        ({"weight_block_size": [128]}, r"weight_block_size is '\[128\]', must be rows and columns"),
        ({"weight_block_size": 128}, "weight_block_size is '128', must be rows and columns"),
        ({"weight_block_size": [0, 128]}, "weight_block_size is 0, must be a whole number, 1 or more"),
        ({"weight_block_size": ["128", 128]}, "weight_block_size is '128', must be a whole number"),
    ],
)
def test_quantisation_that_is_none_is_refused(quantised: object, text: str) -> None:
    with pytest.raises(UsageError, match=f"a llama model: {text}"):
        names_of(LLAMA | {"quantization_config": quantised})


def test_scales_of_a_fused_tensor_whose_parts_do_not_begin_with_a_block_are_refused() -> None:
    fused = [Rule("ab", (Part("a", 0), Part("b", 0)))]
    for rows, is_refused in ((717, True), (640, False)):
        names = Names(fused, {"a": (rows, 256), "b": (717, 256)})  # the last may end in the middle of one
        shape = (-(-rows // 128) + 6, 2)
        if is_refused:
            with pytest.raises(
                UsageError, match="'ab_scale_inv': 'a' has 717 of dimension 0 here, which is not in whole"
            ):
                names.holdings("ab_scale_inv", "float32", shape, 0, 0)
        else:
            assert [one.offset for one in names.holdings("ab_scale_inv", "float32", shape, 0, 0)] == [0, 5 * 2 * 4]
