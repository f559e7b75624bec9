"""A checkpoint on disk reaches inference ranks as weights of trainers do; malformed files are refused by name."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import numpy as np
import pytest

import crossrail as xr
from crossrail.weights import Holding
from crossrail.weights.inventory.checkpoint import Checkpoint
from crossrail.weights.inventory.families import names_of
from crossrail.weights.inventory.mapping import Ranks
from crossrail.weights.inventory.memory import WeightMemory
from crossrail.weights.planning.planner import make_plan
from crossrail.weights.services.trainer import WeightTrainer
from crossrail.weights.step.ready import ready_tasks
from tests.weights.conftest import MakeFleet
from tests.weights.fleet import PATIENCE_S
from tests.weights.memory import Process
from tests.weights.replay import run_task
from tests.weights.safetensors_file import write
from tests.weights.small_model import weights_of


@pytest.mark.parametrize("readers", [1, 2])
async def test_cold_start(make_fleet: MakeFleet, tmp_path: Path, readers: int) -> None:
    weights = weights_of(1)
    names = list(weights)
    write(tmp_path / "a.safetensors", {name: weights[name] for name in names[:3]})
    write(tmp_path / "b.safetensors", {name: weights[name] for name in names[3:]})
    write(tmp_path / "not-mine.safetensors", {"other": np.zeros(4, np.uint16)})
    where = {name: "a.safetensors" if name in names[:3] else "b.safetensors" for name in names}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    fleet = make_fleet(trainer_count=0)
    controller = await fleet.start()
    checkpoints, memories = [], []
    for rank in range(readers):
        box = fleet.mailbox(f"reader-{rank}")
        checkpoints.append(Checkpoint(tmp_path))
        assert checkpoints[-1].names == sorted(names)
        memories.append(checkpoints[-1].memory(fleet.engines[f"reader-{rank}"], rank, readers))
        fleet.trainers[rank] = WeightTrainer(box, memories[-1], 1 << 20)
        await fleet.trainers[rank].join(controller.address, PATIENCE_S)
    published = [trainer.publish(1) for trainer in fleet.trainers.values()]
    offers = asyncio.gather(*published)
    await controller.update(1, PATIENCE_S)
    await offers
    await fleet.assert_holds(1)
    for memory in memories:
        memory.close()
    for trainer in fleet.trainers.values():
        await trainer.close()
    fleet.trainers.clear()
    memories.clear()
    for checkpoint in checkpoints:
        checkpoint.close()


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "0 bytes"),
        (b"\xff" * 16, "a header of"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n", "a pointer of Git LFS.*git lfs pull"),
        ((2).to_bytes(8, "little") + b"[]", "no safetensors header"),
        ((3).to_bytes(8, "little") + b"{{{", "no safetensors header"),
        ((9).to_bytes(8, "little") + b'{"w": {}}', "'w': "),
        ((10).to_bytes(8, "little") + b'{"w": "\xff"}', "bad.safetensors: 'w': "),
        # Python's json, from 3.14 on, nests as deep as that.
        (
            (20006).to_bytes(8, "little") + b'{"w":' + b"[" * 10000 + b"]" * 10000 + b"}",
            "(no safetensors header|'w'): ",
        ),
    ],
)
def test_malformed_file_is_refused(tmp_path: Path, data: bytes, why: str) -> None:
    file = tmp_path / "bad.safetensors"
    file.write_bytes(data)
    with pytest.raises(xr.UsageError, match=why):
        Checkpoint(file)


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": 4},
        {"shape": [3, 3]},
        {"data_offsets": [0, 900]},
        {"data_offsets": [8, 0]},
        {"shape": [-4]},
        {"shape": [1 << 62, 0, 1 << 62], "data_offsets": [0, 0]},
    ],
)
def test_tensor_that_does_not_fit_is_refused(tmp_path: Path, changes: dict[str, object]) -> None:
    file = tmp_path / "bad.safetensors"
    write(file, {"w": np.zeros(4, np.uint16)}, **changes)
    with pytest.raises(xr.UsageError, match=r"bad\.safetensors.*w"):
        Checkpoint(file)


def test_same_name_in_two_files_is_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(tmp_path / f"{name}.safetensors", {"w": np.zeros(4, np.uint16)})
    with pytest.raises(xr.UsageError, match="'w' is in another file too"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("weight_map", "why"),
    [
        ({"w": "a.safetensors", "v": "b.safetensors"}, r"b\.safetensors is not there"),
        ({"w": "a.safetensors", "v": "a.safetensors"}, r"a\.safetensors: 'v' is not in it"),
        ({"w": "a\0.safetensors"}, "no index"),
        ({"w": "."}, "is not there"),
        ({"w": 5}, "no index"),
        (None, "no index"),
    ],
    ids=["a file lacks", "a tensor lacks", "no name", "a folder", "a number", "nothing"],
)
def test_index_that_does_not_say_what_is_there_is_refused(tmp_path: Path, weight_map: object, why: str) -> None:
    write(tmp_path / "a.safetensors", {"w": np.zeros(4, np.uint16)})
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(xr.UsageError, match=why):
        Checkpoint(tmp_path)


def test_index_that_names_another_file_than_the_tensor_is_in_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.safetensors", {"w": np.zeros(4, np.uint16)})
    write(tmp_path / "b.safetensors", {"v": np.zeros(4, np.uint16)})
    weight_map = {"w": "a.safetensors", "v": "a.safetensors", "u": "b.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(xr.UsageError, match=r"a\.safetensors: 'v' is not in it"):
        Checkpoint(tmp_path)


def test_tensors_that_overlap_are_refused(tmp_path: Path) -> None:
    place = {"dtype": "BF16", "shape": [4]}
    header = json.dumps({"w": {**place, "data_offsets": [0, 8]}, "v": {**place, "data_offsets": [6, 14]}}).encode()
    (tmp_path / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(14))
    with pytest.raises(xr.UsageError, match=r"'v' begins at 6, where 'w' has not ended: that is at 8"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("offsets", [(0, 8), (8, 16)], ids=["of the same bytes", "of others"])
def test_name_that_is_twice_in_a_header_is_refused(tmp_path: Path, offsets: tuple[int, int]) -> None:
    first, second = (f'"dtype": "BF16", "shape": [{shape}], ' for shape in ("4", "2, 2"))
    header = f'{{"w": {{{first}"data_offsets": [0, 8]}}, "w": {{{second}"data_offsets": {list(offsets)}}}}}'.encode()
    data = len(header).to_bytes(8, "little") + header + bytes(offsets[1])
    (tmp_path / "a.safetensors").write_bytes(data)
    with pytest.raises(xr.UsageError, match=r"a\.safetensors: .*'w' occurs 2 times"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("offsets", "nbytes", "why"),
    [
        ([[8, 16], [16, 24]], 24, "between the header and 'w' lie 8 bytes"),
        ([[0, 8], [10, 18]], 18, "between 'w' and 'v' lie 2 bytes"),
        ([[0, 8], [8, 16]], 17, "'v' ends at 16, and what follows the header at 17"),
    ],
)
def test_bytes_of_no_tensor_are_refused(tmp_path: Path, offsets: list[list[int]], nbytes: int, why: str) -> None:
    entries = [{"dtype": "BF16", "shape": [4], "data_offsets": place} for place in offsets]
    header = json.dumps(dict(zip("wv", entries, strict=True))).encode()
    (tmp_path / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(nbytes))
    with pytest.raises(xr.UsageError, match=why):
        Checkpoint(tmp_path)


def test_file_cut_off_in_a_tensor_of_an_unknown_type_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    write(file, {"packed": np.zeros(4, np.uint16)}, dtype="F4", shape=[16])
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(xr.UsageError, match="'packed' ends at 8, and what follows the header at 7"):
        Checkpoint(tmp_path)


def test_checkpoint_is_closed_while_an_exception_holds_its_arrays(engine: xr.Engine, tmp_path: Path) -> None:
    write(tmp_path / "a.safetensors", {"w": np.zeros((1, 1, 1, 1, 1, 1, 4), np.uint16)})
    checkpoint = Checkpoint(tmp_path)
    with pytest.raises(xr.UsageError, match=r"'w': shape .* has more than 5 dimensions") as refused:
        checkpoint.memory(engine, 0, 1)
    assert refused.traceback  # whose frames have the array
    checkpoint.close()


def test_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(xr.UsageError, match=r"no \.safetensors file"):
        Checkpoint(tmp_path)


def test_tensor_that_is_not_there(tmp_path: Path) -> None:
    write(tmp_path / "a.safetensors", {"w": np.zeros(4, np.uint16)})
    with xr.Engine("here", transport="null") as engine:
        checkpoint = Checkpoint(tmp_path)
        with pytest.raises(xr.UsageError, match="no tensor 'v'"):
            checkpoint.memory(engine, 0, 1, ["v"])
        checkpoint.close()


def test_tensor_of_an_unknown_type_is_refused_when_it_is_asked_for(engine: xr.Engine, tmp_path: Path) -> None:
    write(tmp_path / "a.safetensors", {"w": np.zeros(4, np.uint16)})
    write(tmp_path / "b.safetensors", {"packed": np.zeros(4, np.uint16)}, dtype="F4", shape=[16])
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.names == ["packed", "w"]
    assert checkpoint.nbytes(["w"]) == 8
    with checkpoint.memory(engine, 0, 1, ["w"]) as memory:
        assert memory.inventory().names == ("w",)
    refusal = r"b\.safetensors: 'packed' is of F4, which is none of .*--ignore"
    with pytest.raises(xr.UsageError, match=refusal):
        checkpoint.nbytes(checkpoint.names)
    with pytest.raises(xr.UsageError, match=refusal):
        checkpoint.memory(engine, 0, 1)
    checkpoint.close()


@pytest.mark.parametrize("readers", [1, 2])
def test_experts_one_by_one_are_also_a_stack(engine: xr.Engine, tmp_path: Path, readers: int) -> None:
    rng = np.random.default_rng(readers)
    whole = rng.integers(0, 1 << 16, (3, 4, 6), np.uint16)
    write(tmp_path / "a.safetensors", {f"mlp.experts.{i}.up.weight": one for i, one in enumerate(whole)})
    rows, single = np.zeros((3, 2, 6), np.uint16), np.zeros((4, 6), np.uint16)
    targets = [WeightMemory(engine, "target", rank) for rank in range(2)]
    box = ((0, 3), (2, 4), (0, 6))
    targets[0].add("mlp.experts.up.weight", rows, shape=whole.shape, box=box, dtype="bfloat16")
    targets[1].add("mlp.experts.1.up.weight", single, dtype="bfloat16")
    checkpoint = Checkpoint(tmp_path)
    sources = [checkpoint.memory(engine, rank, readers) for rank in range(readers)]
    plan = make_plan([one.inventory() for one in sources], [one.inventory() for one in targets])
    memories = {one.rank: [region.array() for region in one.regions] for one in sources}
    received = {one.rank: [region.array() for region in one.regions] for one in targets}
    for rank in range(readers):
        for task in ready_tasks(plan.of_trainer(rank), rank):
            run_task(task, memories[rank], memories, received)
    assert np.array_equal(rows, whole[:, 2:4])
    assert np.array_equal(single, whole[1])
    memories.clear()
    for memory in (*sources, *targets):
        memory.close()
    checkpoint.close()


FP8 = {
    "model_type": "qwen3_moe", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64, "intermediate_size": 48, "num_experts": 3,
    "moe_intermediate_size": 16, "quantization_config": {"weight_block_size": [8, 8]},
}  # fmt: skip


@pytest.mark.parametrize("readers", [1, 2])
def test_published_fp8_values_and_scales_reach_fused_and_stacked_tensors(
    engine: xr.Engine, tmp_path: Path, readers: int
) -> None:
    """As DeepSeek-V3 is published: they go as they are, nothing is quantised again."""
    rng = np.random.default_rng(readers)
    stored: dict[str, np.ndarray] = {}
    attention, experts = "model.layers.0.self_attn", "model.layers.0.mlp.experts"
    shapes = {f"{attention}.q_proj": (32, 32), f"{attention}.k_proj": (16, 32), f"{attention}.v_proj": (16, 32)}
    shapes |= {f"{experts}.{i}.{part}_proj": (16, 32) for i in range(3) for part in ("gate", "up")}
    shapes |= {f"{experts}.{i}.down_proj": (32, 16) for i in range(3)}
    for name, (rows, columns) in shapes.items():
        stored[f"{name}.weight"] = rng.integers(0, 256, (rows, columns), np.uint8)
        stored[f"{name}.weight_scale_inv"] = rng.random((rows // 8, columns // 8), np.float32)
    write(tmp_path / "a.safetensors", stored)

    def wanted(kind: str, rank: int) -> dict[str, np.ndarray]:
        """Of one of two tensor-parallel ranks."""

        def half(name: str, axis: int = 0) -> np.ndarray:
            return np.split(stored[f"{name}.{kind}"], 2, axis)[rank]

        qkv = [half(f"{attention}.{part}_proj") for part in "qkv"]
        w13 = [np.concatenate([half(f"{experts}.{i}.{part}_proj") for part in ("gate", "up")]) for i in range(3)]
        w2 = [half(f"{experts}.{i}.down_proj", 1) for i in range(3)]
        suffix = kind.removeprefix("weight")
        return {
            f"{attention}.qkv_proj.{kind}": np.concatenate(qkv),
            f"{experts}.w13_weight{suffix}": np.stack(w13),
            f"{experts}.w2_weight{suffix}": np.stack(w2),
        }

    names, targets, expected = names_of(FP8), [], []
    for rank in range(2):
        held: list[Holding] = []
        memory = b""
        for name, array in (wanted("weight", rank) | wanted("weight_scale_inv", rank)).items():
            dtype = "float32" if name.endswith("_scale_inv") else "float8_e4m3fn"
            held += names.holdings(name, dtype, array.shape, 0, len(memory), ranks=Ranks(rank, 2))
            memory += array.tobytes()
        targets.append(Process("target", rank, held, len(memory)))
        expected.append(memory)
    checkpoint = Checkpoint(tmp_path)
    sources = [checkpoint.memory(engine, rank, readers) for rank in range(readers)]
    plan = make_plan([one.inventory() for one in sources], [one.inventory for one in targets])
    memories = {one.rank: [region.array() for region in one.regions] for one in sources}
    received = {rank: [one.memory] for rank, one in enumerate(targets)}

    for rank in range(readers):
        for task in ready_tasks(plan.of_trainer(rank), rank):
            run_task(task, memories[rank], memories, received)

    assert [one.memory.tobytes() for one in targets] == expected
    memories.clear()
    for source in sources:
        source.close()
    checkpoint.close()


@pytest.mark.parametrize(
    "changes",
    [{"experts.1.w": None}, {"experts.2.w": (4, 3)}, {"experts.w": (3, 4, 4)}, {"experts.02.w": (4, 4)}],
    ids=["one lacks", "one is of another shape", "the name is taken", "a number with a zero in front"],
)
def test_experts_that_make_no_stack_are_only_themselves(
    engine: xr.Engine, tmp_path: Path, changes: dict[str, tuple[int, ...] | None]
) -> None:
    shapes = {f"experts.{i}.w": (4, 4) for i in range(3)} | changes
    if "experts.02.w" in changes:
        del shapes["experts.2.w"], shapes["experts.0.w"]
    tensors = {f"mlp.{name}": np.zeros(shape, np.uint16) for name, shape in shapes.items() if shape is not None}
    write(tmp_path / "a.safetensors", tensors)
    checkpoint = Checkpoint(tmp_path)
    with checkpoint.memory(engine, 0, 1) as memory:
        assert sorted(memory.inventory().names) == sorted(tensors)
    checkpoint.close()


@pytest.mark.parametrize("dims", [65, 100_000])
def test_shape_of_many_dimensions_is_refused_at_once_and_in_few_words(tmp_path: Path, dims: int) -> None:
    file = tmp_path / "bad.safetensors"
    write(file, {"w": np.zeros(4, np.uint16)}, shape=[(1 << 63) - 1] * dims)
    begun = time.process_time()
    with pytest.raises(xr.UsageError, match=r"'w': .*length") as refused:
        Checkpoint(file)
    assert time.process_time() - begun < 5.0  # of minutes that the product of all takes
    assert len(str(refused.value)) < 1000


def test_long_shape_is_cut_off_in_the_error(tmp_path: Path) -> None:
    file = tmp_path / "bad.safetensors"
    write(file, {"w": np.zeros(4, np.uint16)}, shape=[(1 << 63) - 1] * 64)
    with pytest.raises(xr.UsageError, match=r"'w' of shape \(92.*\.\.\. in BF16 does not lie at 0\.\.8") as refused:
        Checkpoint(file)
    assert len(str(refused.value)) < 1000


@pytest.mark.parametrize("out", ["../one.safetensors", "/one.safetensors", "a/../../one.safetensors"])
def test_index_that_names_a_file_elsewhere_is_refused(tmp_path: Path, out: str) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    write(tmp_path / "one.safetensors", {"w": np.zeros(4, np.uint16)})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": out}}))
    with pytest.raises(xr.UsageError, match=r"one\.safetensors' is not in its folder"):
        Checkpoint(folder)


def test_index_may_name_a_folder_below_and_links(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    (folder / "parts").mkdir(parents=True)
    write(tmp_path / "blob", {"w": np.zeros(4, np.uint16)})
    (folder / "parts" / "one.safetensors").symlink_to(tmp_path / "blob")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "parts/one.safetensors"}}))
    checkpoint = Checkpoint(folder)
    assert checkpoint.names == ["w"]
    checkpoint.close()


def test_readers_have_about_as_many_bytes_each(engine: xr.Engine, tmp_path: Path) -> None:
    sizes = [7, 5, 5, 4, 3, 3, 1]
    write(tmp_path / "a.safetensors", {f"w{i}": np.zeros(1000 * n, np.uint16) for i, n in enumerate(sizes)})
    checkpoint = Checkpoint(tmp_path)
    held = []
    for rank in range(3):
        with checkpoint.memory(engine, rank, 3) as memory:
            held.append(sorted(memory.inventory().names))
    assert held == [["w0", "w5"], ["w1", "w3"], ["w2", "w4", "w6"]]
    for rank, count in ((0, 65537), (3, 3), (-1, 3)):
        with pytest.raises(xr.UsageError, match=f"reader {rank} of {count} is none: there may be 65536"):
            checkpoint.memory(engine, rank, count)
    checkpoint.close()
