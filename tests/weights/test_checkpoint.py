"""A checkpoint on disk reaches inference ranks as weights of trainers do; malformed files are refused by name."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest

import crossrail as xr
from crossrail.weights.inventory.checkpoint import Checkpoint
from crossrail.weights.services.trainer import WeightTrainer
from tests.weights.conftest import MakeFleet
from tests.weights.fleet import PATIENCE_S
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
        ((2).to_bytes(8, "little") + b"[]", "no safetensors header"),
        ((3).to_bytes(8, "little") + b"{{{", "no safetensors header"),
        ((9).to_bytes(8, "little") + b'{"w": {}}', "'w': "),
        ((20006).to_bytes(8, "little") + b'{"w":' + b"[" * 10000 + b"]" * 10000 + b"}", "no safetensors header"),
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
        {"dtype": "F4"},
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
