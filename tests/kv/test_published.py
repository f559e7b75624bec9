"""Simulated transfers of a layer's KV beside those that were published: `crossrail kv sim`."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from crossrail.cli.kv.published import CHUNK_TOKENS, KV_HEADS, PAGE_TOKENS, RANKS, ROWS
from crossrail.cli.kv.simulate import FITTED, GPUS, ONE_GPU, Way, layer_ms
from crossrail.cli.main import main

LAYERS = 2
WITHIN = 0.15
# As simulator.md has them: what the NICs' published figures say of 256, 512 and 1024 pages by two rails.
ONE_GPU_MS = {4096: 0.219, 8192: 0.405, 16384: 0.780}


@pytest.mark.parametrize("tokens", ROWS)
def test_column_is_within_15_percent(tokens: int) -> None:
    """All six rows; two numbers were chosen for the first and the third."""
    assert layer_ms(tokens, ROWS[tokens], FITTED, LAYERS) == pytest.approx(ROWS[tokens].transfer_ms, rel=WITHIN)


@pytest.mark.parametrize("tokens", ONE_GPU_MS)
def test_figures_of_the_nics_alone_say_less(tokens: int) -> None:
    """So that nobody takes the fit for what follows from them."""
    assert layer_ms(tokens, ROWS[tokens], ONE_GPU, LAYERS) == pytest.approx(ONE_GPU_MS[tokens], rel=0.01)


def test_chunks_of_a_long_prompt_do_not_wait_for_each_other() -> None:
    long, short = 64 << 10, CHUNK_TOKENS
    for way in (GPUS, ONE_GPU, FITTED):
        at_once = layer_ms(short, ROWS[short], way, LAYERS)
        assert layer_ms(long, ROWS[long], way, LAYERS) == pytest.approx(at_once, rel=0.01)


def test_layers_that_are_computed_faster_than_sent_wait() -> None:
    hurried = ROWS[CHUNK_TOKENS]._replace(compute_ms=0.1)
    assert layer_ms(CHUNK_TOKENS, hurried, ONE_GPU, LAYERS) > 1.3 * ONE_GPU_MS[CHUNK_TOKENS]


def test_same_seed_same_figure() -> None:
    ways: tuple[Way, ...] = (GPUS, FITTED)
    for way in ways:
        figures = {layer_ms(4096, ROWS[4096], way, LAYERS, seed) for seed in (3, 3, 4)}
        assert len(figures) == 2


def test_pages_are_those_of_the_table() -> None:
    for tokens, row in ROWS.items():
        assert min(tokens, CHUNK_TOKENS) // PAGE_TOKENS * 2 * KV_HEADS == row.pages
    assert KV_HEADS == RANKS


def test_command_shows_the_column_beside_the_papers(tmp_path: Path) -> None:
    file = tmp_path / "kv.json"

    run = CliRunner().invoke(main, ["kv", "sim", "--layers", "1", "--seed", "5", "--json", str(file)])

    assert run.exit_code == 0, run.output
    lines = [line.replace(",", "").split() for line in run.stdout.splitlines()]
    rows = {int(line[0]): line[1:] for line in lines if line and line[0].isdecimal()}
    assert {tokens: (row[0], row[1]) for tokens, row in rows.items()} == {
        tokens: (f"{row.pages}", f"{row.transfer_ms:.3f}") for tokens, row in ROWS.items()
    }
    assert all(abs(float(row[-1]) - 1) <= WITHIN for row in rows.values())
    written = json.loads(file.read_text())
    assert (written["layers"], written["seed"]) == (1, 5)
    assert [f"{one['simulated_ms']['fitted']:.3f}" for one in written["results"]] == [row[4] for row in rows.values()]


def test_full_disk_is_named() -> None:
    run = CliRunner().invoke(main, ["kv", "sim", "--layers", "1", "--json", "/dev/full"])

    assert (run.exit_code, run.stderr) == (1, "error: /dev/full: No space left on device\n")
