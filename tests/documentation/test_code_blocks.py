"""Python shown in README.md and docs/ runs as it stands there.

docs/simulator.md's is run by tests/sim, docs/weights-checkpoint-engine.md's by tests/integrations, docs/moe.md's pieces
by test_torch_moe_blocks.py, the one of vLLM by tests/vllm.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import crossrail as xr
from crossrail.topology import Topology
from tests.contract.setups import why_not
from tests.documentation.blocks import blocks, pages, strange_fences
from tests.support.limits import PROGRAM_S, WAIT_S
from tests.support.process import REPOSITORY
from tests.topology import trees
from tests.topology.trees import Machine, scratch

MYPY_S = 300  # without a cache it reads the whole package

# Whole programs, by file and number of the block, and what they print.
PROGRAMS = {
    ("README.md", 0): "pages 0..3 begin with [0 1 2 3]",
    ("docs/first-tensor.md", 0): "the sum is 1000000",
    ("docs/first-tensor.md", 1): "the sum is 499500",
    ("docs/kv-engine.md", 0): "",
    ("docs/kv-library.md", 0): "",
    ("docs/metrics.md", 0): "http://0.0.0.0:",
    ("docs/moe.md", 0): "64 tokens through 8 experts",
    ("docs/switching.md", 0): "page 30 begins with 2048",
    ("docs/weights.md", 0): "bytes in",
    ("docs/weights-plans.md", 0): "inference rank 0 receives 2 writes",
    ("docs/weights-plans.md", 1): "layers.0.k ((256, 512), (0, 1024)) at byte 2097152",
    ("docs/weights-plans.md", 2): "model.layers.0.block_sparse_moe.experts.w1.weight ((7, 8), (0, 14336), (0, 4096))",
}
# Pieces of programs, each with its own test below; True: the whole file has tests elsewhere.
PIECES: dict[str, bool | int] = {
    "README.md": 2,
    "docs/counting.md": 1,
    "docs/efa.md": 1,
    "docs/flight-recorder.md": 2,
    "docs/gpu-memory.md": 3,
    "docs/memory-promise.md": 1,
    "docs/moe.md": 4,
    "docs/moe-gpu.md": 2,
    "docs/simulator.md": True,
    "docs/slow-path.md": 1,
    "docs/topology.md": 1,
    "docs/two-hosts.md": 2,
    "docs/weights.md": 1,  # tests/weights/test_torch_recipe.py
    "docs/weights-checkpoint-engine.md": True,
    "docs/weights-vllm.md": 1,
}


def test_each_block_has_a_test() -> None:
    for name, texts in blocks().items():
        whole = sum(file == name for file, _ in PROGRAMS)
        pieces = PIECES.get(name, 0)
        assert pieces is True or len(texts) == whole + pieces, f"{name} has {len(texts)} blocks of Python"
    assert set(blocks()) == set(PIECES) | {file for file, _ in PROGRAMS}


def test_no_block_is_passed_over() -> None:
    assert {name: strange for name, text in pages().items() if (strange := strange_fences(text))} == {}


@pytest.mark.parametrize(
    "text", ["```\nx\n```\n", "```py\nx\n```\n", "  ```python\n  x\n  ```\n", "~~~python\nx\n~~~\n", "```python\nx\n"]
)
def test_block_that_would_be_passed_over_is_seen(text: str) -> None:
    assert strange_fences(text)


@contextmanager
def running(text: str, file: Path, at_once: bool = True) -> Iterator[subprocess.Popen[str]]:
    """A program in a process of its own, from a file: it may spawn others, which import that.

    at_once: what it prints comes piece by piece, to be read meanwhile; else when it ends, unmixed with its children's.
    """
    file.write_text(text)
    # An environment that asks for unbuffered output, as images of containers do, would mix lines in their middle.
    environment = {**os.environ, "PYTHONUNBUFFERED": "1" if at_once else ""}
    command = [sys.executable, str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as it:
        try:
            yield it
        finally:
            it.kill()


def printed(process: subprocess.Popen[str]) -> str:
    out, errors = process.communicate(timeout=PROGRAM_S)
    assert process.returncode == 0, f"{out}\n{errors}"
    return out


@pytest.mark.parametrize(("name", "number"), PROGRAMS, ids=lambda value: str(value))
def test_program_runs(name: str, number: int, tmp_path: Path) -> None:
    text = blocks()[name][number].replace("port=9478", "port=0")  # which may be taken here
    with running(text, tmp_path / "program.py", at_once=False) as process:
        assert PROGRAMS[name, number] in printed(process)


def test_programs_pass_strict_mypy(tmp_path: Path) -> None:
    """They are what users begin with. Like ./dev check, whose cache it shares: less than a second after that."""
    files = [tmp_path / f"{name.replace('/', '_').replace('-', '_')[:-3]}_{number}.py" for name, number in PROGRAMS]
    for file, (name, number) in zip(files, PROGRAMS, strict=True):
        file.write_text(blocks()[name][number])

    command = [sys.executable, "-m", "mypy", "--strict", *map(str, files)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=MYPY_S)

    assert done.returncode == 0, done.stdout + done.stderr


def test_two_machines_of_the_readme(tmp_path: Path) -> None:
    _, receive, send = blocks()["README.md"]
    assert "5852..." in send
    with running(receive, tmp_path / "receive.py") as receiver:
        assert receiver.stdout is not None
        descriptor = receiver.stdout.readline().strip()
        with running(send.replace("5852...", descriptor), tmp_path / "send.py") as sender:
            printed(sender)
        printed(receiver)


def test_rails_of_libfabric() -> None:
    """Without a NIC of AWS the first three are the promised errors; the last opens, where there is a libfabric."""
    efa, near, chosen, over_tcp, *more = blocks()["docs/efa.md"][0].splitlines()
    assert not more
    for line in (efa, near, chosen):
        with pytest.raises(xr.CrossrailError, match="efa"):
            exec(line, {"xr": xr})
    if why_not("ofi:tcp"):
        with pytest.raises(xr.CrossrailError, match="libfabric"):
            exec(over_tcp, {"xr": xr})
        return
    run_and_close(over_tcp)


def test_memory_of_a_gpu_without_a_nic() -> None:
    """The engine is the promised error; test_gpu_code_blocks.py has what follows."""
    _, _, opens, *_ = ast.parse(blocks()["docs/gpu-memory.md"][0]).body
    if why_not("verbs"):
        with pytest.raises(xr.CrossrailError, match=r"RDMA port|libibverbs"):
            exec(ast.unparse(opens), {"xr": xr})


def test_watchdog_and_poison(tmp_path: Path) -> None:
    watchdog, poison = blocks()["docs/flight-recorder.md"]
    run_and_close(watchdog.replace("/var/tmp/dumps", str(tmp_path)))
    with xr.Engine("here") as engine:
        region = engine.alloc(4 << 20)
        exec(poison, {"region": region, "offset": 100, "nbytes": 1000, "pages": np.array([3, 1, 8])})


def test_generations_of_a_region() -> None:
    with xr.Engine("here") as engine:
        names: dict[str, Any] = {"engine": engine, "pages": np.zeros(1000, np.uint8)}
        exec(blocks()["docs/memory-promise.md"][0], names)
        assert bytes(names["descriptor"]) == bytes(names["region"].descriptor)


def test_choice_of_rails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with scratch() as top:
        machine = Machine(Path(top))
        trees.p5(machine)
        recorded = Topology.read(machine.sys)
    monkeypatch.setattr(Topology, "read", lambda: recorded)
    exec(blocks()["docs/topology.md"][0], {})
    assert "rdmap" in capsys.readouterr().out


def test_choice_of_rails_on_this_machine() -> None:
    """As who copies it has no GPU at the address of an example."""
    exec(blocks()["docs/topology.md"][0], {})


def test_requirement() -> None:
    run_and_close(blocks()["docs/slow-path.md"][0])


def test_waiting_for_a_count() -> None:
    with xr.Engine("here") as engine:
        region = engine.alloc(1024)
        pages = np.arange(1024)
        engine.submit_paged_writes(region, pages, region.descriptor, pages, 1, imm=7)
        names: dict[str, Any] = {"engine": engine}
        exec(blocks()["docs/counting.md"][0], names)
        assert names["counter"].poll() == 0


def test_rails_of_two_hosts() -> None:
    line = blocks()["docs/two-hosts.md"][0]
    assert 'rails=["eth0", "eth1"], port=7300' in line
    run_and_close(line.replace('["eth0", "eth1"], port=7300', '["lo"]'))


def test_certificates_of_two_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands make what the engines take, as they stand there."""
    monkeypatch.chdir(tmp_path)
    (commands,) = (block for block in blocks("bash")["docs/two-hosts.md"] if "openssl req" in block)
    subprocess.run(["bash", "-e", "-c", commands], check=True, timeout=PROGRAM_S, stderr=subprocess.DEVNULL)
    decoder: dict[str, Any] = {"xr": xr}
    prefiller: dict[str, Any] = {"xr": xr}
    text = blocks()["docs/two-hosts.md"][1].replace('["eth0"]', '["lo"], transport="tcp"')
    exec(text, decoder)
    exec(text.replace("decoder-0", "prefiller-0"), prefiller)
    with decoder["engine"] as here, prefiller["engine"] as there:
        here.connect(there.address, WAIT_S)
        assert "TLS_" in str(here.explain(there.address))


class _Recorded:
    """A controller and a client of vLLM that only note what they are asked for."""

    address = b"address"

    def __init__(self) -> None:
        self.calls: list[str] = []

    async def update(self, version: int, *_: object) -> None:
        self.calls.append(f"update {version}")

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: self.calls.append(name)


async def test_updates_of_live_instances() -> None:
    """tests/weights/test_vllm_weights.py has what workers make of these calls, tests/vllm what vLLM does."""
    seen = _Recorded()
    names = {"controller": seen, "clients": [seen], "tensor_parallel": 2, "data_parallel": 1, "version": 7}
    code = compile(blocks()["docs/weights-vllm.md"][0], "docs", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    await eval(code, names)
    assert seen.calls[:2] == ["init_weight_transfer_engine", "start_weight_update"]
    assert set(seen.calls[2:4]) == {"update_weights", "update 7"}
    assert seen.calls[4:] == ["finish_weight_update"]


def run_and_close(text: str) -> None:
    names: dict[str, Any] = {"xr": xr}
    exec(text, names)
    names["engine"].close()
