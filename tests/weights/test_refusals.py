"""Inventories that do not fit together are refused, by the parameter's name."""

from __future__ import annotations

from typing import Any

import pytest

from crossrail.errors import UsageError
from crossrail.weights import ControllerOptions, Holding, Inventory, PlanOptions, RegionInfo, make_plan

W = Holding.whole("w", "bfloat16", (8, 4), 0, 0)
N = Holding.whole("n", "float32", (4,), 0, 512)


def holder(role: Any, rank: int, *holdings: Holding) -> Inventory:
    return Inventory.of(role, rank, [RegionInfo(b"", 1024)], holdings)


def rows(start: int, stop: int, **more: Any) -> Holding:
    return Holding("w", "bfloat16", (8, 4), ((start, stop), (0, 4)), 0, 0, **more)


def refused(trainers: list[tuple[Holding, ...]], targets: list[tuple[Holding, ...]], **options: Any) -> str:
    with pytest.raises(UsageError) as caught:
        make_plan(
            [holder("trainer", rank, *held) for rank, held in enumerate(trainers)],
            [holder("target", rank, *held) for rank, held in enumerate(targets)],
            PlanOptions(**options),
        )
    return str(caught.value)


def test_parameter_that_no_trainer_holds() -> None:
    assert refused([(W,)], [(W, N)]) == (
        "'n': wanted by inference ranks and held by no trainer. Next: add() it under this name at a trainer, also if "
        "it is tied to another"
    )


@pytest.mark.parametrize(
    ("held", "wanted", "hint"),
    [
        ("_orig_mod.layers.0.n", "layers.0.n", ": there is '_orig_mod.layers.0.n'. Leave out what a wrapper put"),
        ("layers.0.n", "module.layers.0._checkpoint_wrapped_module.n", ": there is 'layers.0.n'. Leave out what a"),
        ("base_model.model.q.base_layer.weight", "q.weight", "weight'. Merge peft's adapters, and leave out what it"),
        ("model.layers.0.q.weight", "layers.0.q.weight", ": there is 'model.layers.0.q.weight'"),
        ("model.layers.0.q.weight", "norm.bias", "tied to another"),
    ],
)
def test_name_that_was_probably_meant_is_named(held: str, wanted: str, hint: str) -> None:
    at_trainer, at_target = (Holding.whole(name, "float32", (4,), 0, 0) for name in (held, wanted))

    why = refused([(W, at_trainer)], [(W, at_target)])

    assert why.startswith(f"'{wanted}': wanted by inference ranks and held by no trainer. Next: ")
    assert hint in why
    assert hint == "tied to another" or not why.endswith("tied to another")


def test_many_that_lack_are_not_all_listed() -> None:
    many = [Holding.whole(f"m{i}", "float32", (1,), 0, 4 * i) for i in range(9)]

    assert refused([(W,)], [tuple(many)]).startswith("'m0', 'm1', 'm2', 'm3', 'm4' and 4 more: wanted")


def test_parameter_that_no_target_wants_unless_ignored_or_tied() -> None:
    assert "'n': held by trainers and wanted by no inference rank. Next: " in refused([(W, N)], [(W,)])

    trainer, target = holder("trainer", 0, W, N), holder("target", 0, W)
    assert len(make_plan([trainer], [target], PlanOptions(ignore=("n",))).writes) == 1
    tied = holder("trainer", 0, W, Holding.whole("lm_head", "bfloat16", (8, 4), 0, 0))
    assert len(make_plan([tied], [target]).writes) == 1


def test_shapes_that_differ() -> None:
    other = Holding.whole("w", "bfloat16", (4, 8), 0, 0)

    pair = "'w' has different shapes: (8, 4) at trainer 0 and (4, 8) at"
    assert refused([(W,)], [(other,)]) == f"{pair} inference rank 0"
    assert refused([(W,), (other,)], [(W,)]) == f"{pair} trainer 1"


def test_dtypes_that_differ_at_trainers_and_that_cannot_be_cast() -> None:
    assert "'w' has different dtypes at the trainers: bfloat16 at trainer 0 and float32 at trainer 1" in refused(
        [(W,), (Holding.whole("w", "float32", (8, 4), 0, 0),)], [(W,)]
    )
    whole_numbers = Holding.whole("w", "int32", (8, 4), 0, 0)
    assert refused([(W,)], [(whole_numbers,)]) == "'w': inference rank 0 wants int32, trainers have bfloat16"


def one(dtype: str, name: str = "w") -> Holding:
    return Holding.whole(name, dtype, (8, 4), 0, 0)


def scales(*grid: int, block: tuple[int, ...]) -> Holding:
    return Holding.whole("s", "float32", grid, 0, 64, scale_of="w", block=block)


@pytest.mark.parametrize(
    ("have", "want"),
    [
        ("float8_e4m3fn", "bfloat16"),
        ("float8_e5m2", "float32"),
        ("float32", "float8_e5m2"),
        ("int8", "uint8"),
        ("bool", "float32"),
    ],
)
def test_casts_that_there_are_not(have: str, want: str) -> None:
    assert refused([(one(have),)], [(one(want),)]) == f"'w': inference rank 0 wants {want}, trainers have {have}"


@pytest.mark.parametrize("have", ["float64", "float16", "float8_e5m2", "int32"])
def test_what_is_not_quantised(have: str) -> None:
    found = refused([(one(have),)], [(one("float8_e4m3fn"), scales(2, 1, block=(4, 4)))])
    assert found == (
        f"'w': inference rank 0 wants float8_e4m3fn with scales, trainers have {have}: "
        "it is made of float32 and bfloat16 only"
    )


def test_scales_of_what_trainers_have_as_fp8_without_them() -> None:
    found = refused([(one("float8_e4m3fn"),)], [(one("float8_e4m3fn"), scales(2, 1, block=(4, 4)))])
    assert "wants float8_e4m3fn with scales, trainers have float8_e4m3fn: it is made of" in found


def test_group_of_a_mesh_that_no_trainer_has() -> None:
    held = [(rows(0, 4, mesh="experts"),), (rows(4, 8, mesh="experts"), Holding.whole("n", "float32", (4,), 0, 512))]

    found = refused(held, [(W, N)], groups=(("expert",), ("experts",), ("dense",)))
    assert found == "groups: no trainer has a mesh 'dense', 'expert', there is '', 'experts'"
    # An inference rank's is none.
    assert (
        refused([(rows(0, 8, mesh="a"),)], [(W,)], groups=(("",),)) == "groups: no trainer has a mesh '', there is 'a'"
    )


def test_claims_that_overlap() -> None:
    found = refused([(rows(0, 5),), (rows(4, 8),)], [(W,)])

    assert found == "'w': [4:5, 0:4] is claimed by trainers whose boxes overlap, in mesh ''"


def test_rows_that_nobody_holds() -> None:
    assert refused([(rows(0, 3),), (rows(4, 8),)], [(W,)]) == "'w': [3:4, 0:4] is held by no trainer, in mesh ''"
    assert refused([(rows(0, 7),)], [(W,)]) == "'w': [7:8, 0:4] is held by no trainer"


def test_meshes_that_overlap_in_part() -> None:
    found = refused([(rows(0, 5, mesh="a"),), (rows(4, 8, mesh="b"),)], [(W,)])

    assert found.startswith("'w': [4:5, 0:4] is claimed by trainers whose boxes overlap. ")
    assert found.endswith("where some are gone for good, PlanOptions(partial=True)")


def test_two_meshes_that_both_have_holes() -> None:
    held = [(rows(0, 3, mesh="a"),), (rows(4, 8, mesh="a"),), (rows(0, 5, mesh="b"),), (rows(6, 8, mesh="b"),)]

    found = refused(held, [(W,)])
    assert found.startswith("'w': [3:4, 0:4] is held by no trainer, in mesh 'a'. A mesh has all of a parameter, or ")
    # What one has of them whole is no help for what it lacks.
    assert refused([*held, (rows(0, 6, mesh="c"),)], [(W,)]).startswith("'w': [3:4, 0:4] is held by no trainer")


def test_what_no_mesh_has_any_more() -> None:
    held = [(rows(0, 3, mesh="a"),), (rows(4, 8, mesh="a"),), (rows(0, 2, mesh="b"),), (rows(6, 8, mesh="b"),)]

    assert refused(held, [(W,)], partial=True) == "'w': [3:4, 0:4] is held by no trainer"
    assert refused(held[:2], [(W,)], partial=True) == "'w': [3:4, 0:4] is held by no trainer, in mesh 'a'"


def test_boxes_of_a_mesh_that_overlap_where_some_may_be_gone() -> None:
    found = refused([(rows(0, 5, mesh="a"),), (rows(4, 8, mesh="a"),)], [(W,)], partial=True)

    assert found == "'w': [4:5, 0:4] is claimed by trainers whose boxes overlap, in mesh 'a'"


def test_the_same_box_listed_twice() -> None:
    assert refused([(W, W)], [(W,)]) == "'w': trainer 0 lists the same box twice"


def test_fp8_without_scales_and_scales_of_another_grid() -> None:
    quantised = Holding.whole("w", "float8_e4m3fn", (8, 4), 0, 0)
    assert refused([(W,)], [(quantised,)]) == "'w': inference rank 0 wants float8_e4m3fn, and no scales of it"

    scales = Holding.whole("s", "float32", (3, 1), 0, 64, scale_of="w", block=(4, 4))
    assert refused([(W,)], [(quantised, scales)]).startswith("'s': shape [3, 1")


def test_scales_that_do_not_cover_the_blocks_of_their_values() -> None:
    quantised = Holding.whole("w", "float8_e4m3fn", (8, 4), 0, 0)
    half = Holding("s", "float32", (2, 1), ((0, 1), (0, 1)), 0, 64, scale_of="w", block=(4, 4))

    found = refused([(W,)], [(quantised, half)])

    assert found == "'w': inference rank 0 has float8_e4m3fn, and no scales of its blocks [1:2, 0:1]"


def test_ranks_twice_roles_exchanged_and_nobody_at_all() -> None:
    trainer, target = holder("trainer", 2, W), holder("target", 0, W)
    for trainers, targets, text in (
        ([trainer, trainer], [target], "rank 2 occurs twice among the trainers"),
        ([target], [target], "is given as a trainer"),
        ([], [target], "there is no trainer"),
        ([trainer], [], "there is no inference rank"),
        ([holder("trainer", 0)], [target], "'w': wanted by inference ranks"),
    ):
        with pytest.raises(UsageError, match=text):
            make_plan(trainers, targets)


@pytest.mark.parametrize(
    "options",
    [
        {"gather": "some"},
        {"write_bytes_min": 0},
        {"write_bytes_min": 1e5},
        {"task_bytes_max": 1e8},
        {"task_bytes_max": True},
        {"speeds": {0: "fast"}},
        {"speeds": {0: 0.0}},
        {"speeds": [0.5]},
        {"ignore": "value_head.weight"},
        {"ignore": (1,)},
        {"groups": ("experts", "dense")},
        {"groups": "experts"},
        {"groups": ((1,),)},
        {"groups": (("experts", "dense"), ("experts",))},
    ],
)
def test_options_that_are_none(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(options))):
        PlanOptions(**options)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"imm_first": -5}, "imm_first is -5, must be in 0.."),
        ({"imm_first": 1 << 27}, "imm_first is 134217728, must be in 0..133169152"),
        ({"imm_first": 1.5}, "imm_first must be a whole number"),
        ({"abort_s": -1.0}, "abort_s is -1.0, must be seconds, 0 or more"),
        ({"abort_s": "8"}, "abort_s must be a number"),
        ({"evict_s": float("nan")}, "evict_s is nan"),
        ({"progress_s": 0.0}, "progress_s is 0, must be more"),
    ],
)
def test_options_of_a_controller_that_are_none(options: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        ControllerOptions(**options)
