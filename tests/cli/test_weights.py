"""`crossrail weights`: plan, show and sim in processes of their own, at a small size."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from click.testing import CliRunner

from crossrail.cli.main import main
from crossrail.weights import Plan
from crossrail.weights.models import MODELS, Cluster, target_inventory, trainer_inventory

SMALL = ["qwen3-235b", "--trainers", "4", "--targets", "2"]


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


def test_plan_from_inventories(tmp_path: Path) -> None:
    model, cluster = MODELS["qwen3-235b"], Cluster(1, 1, 1, 1, 1, 1)
    files = []
    for inventory in (trainer_inventory(model, cluster, 0), target_inventory(model, cluster, 0)):
        files += ["--inventory", tmp_path / inventory.role]
        (tmp_path / inventory.role).write_bytes(inventory.to_bytes())

    assert "1 trainer to 1 target" in run("weights", "plan", *files)


def test_sim_says_how_long_and_what_bounds_it(tmp_path: Path) -> None:
    file = tmp_path / "out.json"

    shown = run("weights", "sim", *SMALL, "--way", "needed", "--watermark", "64G", "--json", file)

    assert "links of receivers" in shown
    (outcome,) = json.loads(file.read_text())["outcomes"].values()
    assert outcome["total_s"] > max(outcome["bounds"].values())


def test_wrong_usage_is_one_line() -> None:
    assert "model 'gpt' is not known; there are kimi-k2" in run("weights", "plan", "gpt", status=2)
    assert "either a MODEL or --inventory" in run("weights", "plan", status=2)
    assert "must be 3 or a multiple of it" in run("weights", "plan", *SMALL, "--pipeline", "3", status=2)
    assert "watermark is 1048576" in run("weights", "sim", *SMALL, "--way", "needed", "--watermark", "1M", status=2)


def test_command_leaves_the_log_of_its_program_as_it_was(tmp_path: Path) -> None:
    log = logging.getLogger("crossrail")
    before = log.level
    run("weights", "show", tmp_path / "none", status=2)
    assert log.level == before
