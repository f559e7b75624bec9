"""`crossrail topo` as a user runs it."""

from __future__ import annotations

import importlib
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from rich.console import Console
from rich.text import Text

from crossrail.cli import main
from crossrail.cli.topo import _core_list
from tests.topology import trees
from tests.topology.trees import Machine, scratch

ALL = [
    trees.p5, trees.p5en, trees.p4d, trees.dgx, trees.hgx_pairs, trees.azure_ndv5, trees.cloud_vm, trees.flat_vm,
    trees.sriov_host, trees.apart, trees.laptop, trees.container, trees.bonded, trees.garbage,
]  # fmt: skip


@pytest.fixture
def top() -> Iterator[Path]:
    """A directory for a tree."""
    with scratch() as name:
        yield Path(name)


@pytest.fixture(autouse=True)
def columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setenv("NO_COLOR", "1")


def topo(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["topo", *map(str, arguments)])


def succeeded(result: Result) -> str:
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("make", ALL, ids=lambda make: make.__name__)
def test_every_machine_is_shown_in_100_columns(top: Path, make: Callable[[Machine], None]) -> None:
    make(Machine(top))

    text = succeeded(topo("--root", top))

    shown = [line for line in text.splitlines() if not line.startswith(("note:", "read from"))]
    assert max(map(len, shown)) <= 100, text
    assert "\x1b" not in text


@pytest.mark.parametrize("columns", [30, 40, 55, 80])
def test_numbers_are_whole_on_narrow_screens(top: Path, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    trees.p5(Machine(top))
    monkeypatch.setenv("COLUMNS", str(columns))

    for text in (succeeded(topo("--root", top)), succeeded(topo("--root", top, "--device", "gpu6"))):
        assert {"48-95,144-191", "rdmap181s0", "rdmap184s0"} <= {word.rstrip(",") for word in text.split()}


def test_long_list_of_cores_is_broken_between_numbers() -> None:
    cores = tuple(range(0, 128, 2))
    lines = Text(_core_list(cores)).wrap(Console(file=io.StringIO()), 30)
    assert [int(word) for line in lines for word in line.plain.replace(",", " ").split()] == list(cores)


def test_tree_and_choices_of_a_p5(top: Path) -> None:
    trees.p5(Machine(top))

    text = succeeded(topo("--root", top))

    assert "2 NUMA nodes, 8 GPUs, 41 NICs: 32 EFA, 9 Ethernet" in text
    assert "├── pci0000:55 › switch 0000:56:00.0\n│   ├── gpu1        0000:64:00.0  NVIDIA H100 80GB HBM3\n" in text
    assert "EFA         rdmap96s0 rdmap97s0 rdmap98s0 rdmap99s0       4 × 100 Gb/s  up  → gpu1\n" in text
    (row,) = [line for line in text.splitlines() if line.startswith("gpu6 ")]
    assert row.split()[1:] == [
        *(f"rdmap{bus}s0" for bus in (181, 182, 183, 184)), "same", "PCIe", "switch,", "4", "×", "100", "Gb/s",
        "48-95,144-191",
    ]  # fmt: skip


def test_one_device_is_shown_with_every_reason(top: Path) -> None:
    trees.dgx(Machine(top))

    text = succeeded(topo("--root", top, "--device", "0000:43:00.0"))

    assert "Rails of gpu1 (0000:43:00.0): same PCIe root port, 400 Gb/s" in text
    assert "mlx5_3 (ibp64s0)" in text and "PXB" in text
    assert "farther: NODE, not PXB; under no GPU's switch" in text
    assert "gpu2" not in text


def test_json_has_everything(top: Path) -> None:
    trees.dgx(Machine(top))

    report = json.loads(succeeded(topo("--root", top, "--json")))

    assert report["version"] == 1
    assert list(report) == ["version", "root", "cpus", "numa_nodes", "gpus", "nics", "choices", "notes"]
    assert [gpu["name"] for gpu in report["gpus"]] == [f"gpu{index}" for index in range(8)]
    assert [choice["device"] for choice in report["choices"]] == [*(f"gpu{i}" for i in range(8)), "numa0", "numa1"]
    choice = report["choices"][7]
    assert choice["rails"] == [{"nic": "mlx5_11", "distance": "PXB", "reason": "same PCIe root port"}]
    assert choice["worker_cpus"] == {"cpus": "56-111,168-223", "reason": "the rails are on numa1"}
    assert len(choice["rails"]) + len(choice["rejected"]) == len(report["nics"])
    (nic,) = [nic for nic in report["nics"] if nic["name"] == "mlx5_11"]
    assert nic["pci"]["bridges"] == ["0000:d9:01.0", "0000:da:00.0", "0000:db:00.0"]
    assert (nic["kind"], nic["numa"], nic["speed_gbps"]) == ("infiniband", 1, 400.0)


def test_json_of_one_device_and_one_need(top: Path) -> None:
    trees.p5(Machine(top))

    report = json.loads(succeeded(topo("--root", top, "--json", "--device", "gpu0", "--need", "ip")))

    assert [choice["device"] for choice in report["choices"]] == ["gpu0"]
    assert [rail["nic"] for rail in report["choices"][0]["rails"]] == ["enp71s0"]


def test_this_machine_is_shown_and_described() -> None:
    assert succeeded(topo()).startswith("crossrail topo  ")
    assert json.loads(succeeded(topo("--json")))["root"] == "/sys"


def test_terminal_without_unicode_is_served(top: Path) -> None:
    trees.p5(Machine(top))

    result = CliRunner(charset="ascii").invoke(main, ["topo", "--root", str(top)])

    assert "4 ? 100 Gb/s" in succeeded(result)


def test_root_may_be_the_sysfs_itself(top: Path) -> None:
    trees.cloud_vm(Machine(top))

    assert succeeded(topo("--root", top / "sys")) == succeeded(topo("--root", top))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--root", "/no/such/place"], "is not a directory"),
        (["--root", "."], "holds no sysfs tree"),
        (["--device", "gpu99"], "'gpu99' is not known here"),
        (["--need", "speed"], "'speed' is not one of"),
    ],
)
def test_nonsense_refused_in_words(
    top: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str
) -> None:
    monkeypatch.chdir(top)

    result = topo(*arguments)

    assert result.exit_code == 2
    assert words in result.output and "Traceback" not in result.output


def test_rails_that_an_engine_takes_by_itself_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    # The module, not the command of the same name that the group keeps.
    module = importlib.import_module("crossrail.cli.topo")
    assert "By default an engine uses" not in succeeded(topo()) or module.default_rails("auto", 1) != 1
    monkeypatch.setattr(module, "default_rails", lambda transport, rails: ["mlx5_1:1"])

    assert "By default an engine uses mlx5_1:1;" in succeeded(topo())
