"""A simulation with weights is replayed from its seed, byte for byte."""

import json
import os
import subprocess
import sys

import numpy as np

from crossrail import sim
from crossrail.sim.scenarios import find, play
from crossrail.weights import WeightMemory

SCENARIO = "tests.weights.own_scenario:updates"


def digests(*arguments: str, hash_seed: int) -> list[str]:
    """Of the logs, as `crossrail sim` gives them."""
    command = [sys.executable, "-m", "crossrail", "sim", "--scenario", SCENARIO, "--json", "--jobs", "1", *arguments]
    environment = os.environ | {"PYTHONHASHSEED": str(hash_seed)}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=environment)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return [run["digest"] for run in json.loads(ended.stdout)["runs"]]


def test_each_run_of_a_seed_gives_the_same_log() -> None:
    scenario = find(SCENARIO)[0]
    first, *others = (play(scenario, 3, keep_log=True) for _ in range(6))
    assert first.ok, first.failures
    for again in others:
        assert again.log == first.log
    assert play(scenario, 4).digest != first.digest


def test_sim_twice_and_other_processes_give_the_same_log() -> None:
    assert digests("--seed", "3", "--runs", "2", "--twice", hash_seed=1) == digests(
        "--seed", "3", "--runs", "2", hash_seed=2
    )


def test_regions_of_a_simulated_memory_do_not_depend_on_where_arrays_lie() -> None:
    whole = np.zeros((4, 64), np.float32)
    apart = [np.frombuffer(whole[row].data, np.float32) for row in (2, 0, 1)]  # neighbours, as an allocator may do
    with sim.World() as world, WeightMemory(world.host("a").engine(), "target", 0) as memory:
        for name, array in zip("abc", apart, strict=True):
            memory.add(name, array)
        memory.add("d", whole[2:])  # of the block that all of them overlap
        overlapping = [(row["region"], row["offset"]) for row in memory.inventory().rows]
    with sim.World() as world, WeightMemory(world.host("a").engine(), "target", 0) as memory:
        for name, array in zip("abc", apart, strict=True):
            memory.add(name, array)
        separate = [(row["region"], row["offset"]) for row in memory.inventory().rows]
    assert separate == [(0, 0), (1, 0), (2, 0)]
    assert overlapping == [(0, 512), (0, 0), (0, 256), (0, 512)]
