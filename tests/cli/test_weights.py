"""`crossrail weights`: plan, show and sim in processes of their own, at a small size."""

from __future__ import annotations

import io
import json
import logging
from pathlib import Path

import pytest
from click.testing import CliRunner

from crossrail.cli.main import main
from crossrail.errors import CrossrailError
from crossrail.weights import Plan
from crossrail.weights.inventory.models import MODELS, Cluster, target_inventory, trainer_inventory
from crossrail.weights.planning.show import new_figure

SMALL = ["qwen3-235b", "--trainers", "4", "--targets", "2"]
THIN = [*SMALL, "--layers", "1"]
PNG = b"\x89PNG\r\n"


@pytest.fixture(scope="module", autouse=True)
def fonts() -> None:
    """matplotlib keeps its fonts open from its first picture on."""
    figure = new_figure(1, 1)
    figure.subplots().set_title("any")
    figure.savefig(io.BytesIO())


def run(*arguments: object, status: int = 0) -> str:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exit_code == status, result.output
    return result.output


def test_plan_is_saved_shown_and_compared(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    assert "planned and proved" in run("weights", "plan", *SMALL, "-o", one)
    run("weights", "plan", *SMALL, "--gather", "full", "-o", other)

    shown = run("weights", "show", one)
    assert f"plan {Plan.load(one).digest}" in shown
    assert "4 trainers to 2 targets" in shown
    assert "the plans are the same" in run("weights", "show", one, "--compare", one)
    assert "bytes go another way" in run("weights", "show", one, "--compare", other, status=1)


def test_heat_map_of_a_terminal_without_unicode_says_as_much(tmp_path: Path) -> None:
    run("weights", "plan", *THIN, "-o", tmp_path / "plan")
    shown = CliRunner(charset="ascii").invoke(main, ["weights", "show", str(tmp_path / "plan")]).output
    assert "#" in shown and "?" not in shown


def test_plan_is_saved_whoever_stops_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: object) -> None:
        raise CrossrailError("nobody reads")

    monkeypatch.setattr("crossrail.cli.weights.plan.print_summary", gone)
    run("weights", "plan", *THIN, "-o", tmp_path / "plan", status=1)
    assert Plan.load(tmp_path / "plan").writes.size


def test_plan_from_inventories(tmp_path: Path) -> None:
    model, cluster = MODELS["qwen3-235b"], Cluster(1, 1, 1, 1, 1, 1)
    files = []
    for inventory in (trainer_inventory(model, cluster, 0), target_inventory(model, cluster, 0)):
        files += ["--inventory", tmp_path / inventory.role]
        (tmp_path / inventory.role).write_bytes(inventory.to_bytes())

    assert "1 trainer to 1 target" in run("weights", "plan", *files)


def test_plan_of_more_pipeline_stages_than_layers() -> None:
    shown = run("weights", "plan", "qwen3-235b", "--layers", 1, "--trainers", 4, "--pipeline", 4, "--targets", 2)

    assert "4 trainers to 2 targets" in shown


def test_sim_says_how_long_and_what_bounds_it(tmp_path: Path) -> None:
    file = tmp_path / "out.json"

    shown = run("weights", "sim", *THIN, "--way", "needed", "--seed", 5, "--json", file)

    assert "links of receivers" in shown
    written = json.loads(file.read_text())
    assert written["seed"] == 5
    (outcome,) = written["outcomes"].values()
    assert outcome["total_s"] > max(outcome["bounds"].values())


def test_sim_draws_what_was_when(tmp_path: Path) -> None:
    image, file = tmp_path / "out.png", tmp_path / "out.json"

    run("weights", "sim", *THIN, "--way", "all", "--slow-link", 4, "--plot", image, "--json", file)

    assert list(json.loads(file.read_text())["outcomes"]) == ["paper", "needed", "adapted"]
    assert image.read_bytes().startswith(PNG)


def test_sweep_has_a_row_for_each_value_also_for_one_that_is_refused(tmp_path: Path) -> None:
    image, file = tmp_path / "out.png", tmp_path / "out.json"

    shown = run(
        "weights", "sim", *THIN, "--way", "needed", "--sweep", "slow-link=1,8,5000", "--plot", image, "--json", file
    )

    content = json.loads(file.read_text())
    assert [point["value"] for point in content["points"]] == [1, 8]
    assert "slow_link=5000.0 must be 1 to 1000" in content["refused"]["5,000"]
    slow = content["points"][1]["outcomes"]["needed"]
    assert slow["bound"] == "links of senders"
    assert "links of senders" in shown
    assert image.read_bytes().startswith(PNG)


def test_plan_is_drawn(tmp_path: Path) -> None:
    plan, image = tmp_path / "plan", tmp_path / "plan.png"
    run("weights", "plan", *THIN, "-o", plan)

    run("weights", "show", plan, "--draw", image)

    assert image.read_bytes().startswith(PNG)


def test_wrong_usage_is_one_line() -> None:
    assert "model 'gpt' is not known; there are kimi-k2" in run("weights", "plan", "gpt", status=2)
    assert "either a MODEL or --inventory" in run("weights", "plan", status=2)
    assert "must be 3 or a multiple of it" in run("weights", "plan", *SMALL, "--pipeline", "3", status=2)
    for name in ("pipeline", "expert_parallel", "dense_shard", "target_experts"):
        option = f"--{name.replace('_', '-')}"
        assert f"{name} is 0, must be at least 1" in run("weights", "plan", *SMALL, option, "0", status=2)
    assert "--sweep ranks: must be one of trainers" in run("weights", "sim", *THIN, "--sweep", "ranks", status=2)
    assert "'a' are not numbers" in run("weights", "sim", *THIN, "--sweep", "targets=a", status=2)
    assert "'' are not numbers" in run("weights", "sim", *THIN, "--sweep", "trainers=", status=2)
    assert "is not a number of ranks" in run("weights", "sim", *THIN, "--sweep", "targets=1.5", status=2)
    assert "watermark is 1048576" in run("weights", "sim", *SMALL, "--way", "needed", "--watermark", "1M", status=2)


def test_command_leaves_the_log_of_its_program_as_it_was(tmp_path: Path) -> None:
    log = logging.getLogger("crossrail")
    before = log.level
    run("weights", "show", tmp_path / "none", status=2)
    assert log.level == before


def test_file_that_cannot_be_written_is_named() -> None:
    assert "/dev/full: No space left on device" in run("weights", "sim", *THIN, "--json", "/dev/full", status=1)
