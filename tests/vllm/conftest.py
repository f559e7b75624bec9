"""Instances that all tests share. They take minutes to start on a small machine: each is started once, side by side."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tomllib

from crossrail.integrations.vllm.plugin import PLAIN_VARIABLE
from tests.support.tiny_llama import make_model
from tests.vllm.support import ROOT, Instance, install

LEASE_S = 4.0
QUICK = {"lease_s": LEASE_S, "heartbeat_s": 1.0, "load_s": 60.0}

Start = Callable[..., Instance]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.timeout(1800))


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="session")
def model(folder: Path) -> Path:
    return make_model(folder / "model")


@pytest.fixture(scope="session")
def other(folder: Path) -> Path:
    """The same model with other weights."""
    return make_model(folder / "other", seed=2)


@pytest.fixture(scope="session")
def installed(folder: Path) -> dict[str, str]:
    """The environment of an instance that sees our entry points, as if the wheel was installed there."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    site = install(folder / "site", "crossrail", project["version"], project["entry-points"])
    return {"PYTHONPATH": f"{ROOT / 'src'}:{site}", PLAIN_VARIABLE: "0"}


@pytest.fixture(scope="session")
def fleet(folder: Path, model: Path) -> Iterator[dict[str, Instance]]:
    """alone: without a connector. p: prefills. d: decodes, and fails what it cannot load. r: recomputes that."""
    made = {
        "alone": Instance(folder, "alone", model, None),
        "p": Instance(folder, "p", model, "kv_producer", options=QUICK),
        "d": Instance(folder, "d", model, "kv_consumer", options=QUICK),
        "r": Instance(folder, "r", model, "kv_both", policy="recompute", options=QUICK),
    }
    for instance in made.values():
        instance.wait_ready()
    yield made
    for instance in made.values():
        instance.close()


@pytest.fixture(scope="session")
def alone(fleet: dict[str, Instance]) -> Instance:
    return fleet["alone"]


@pytest.fixture(scope="session")
def p(fleet: dict[str, Instance]) -> Instance:
    return fleet["p"]


@pytest.fixture(scope="session")
def d(fleet: dict[str, Instance]) -> Instance:
    return fleet["d"]


@pytest.fixture(scope="session")
def r(fleet: dict[str, Instance]) -> Instance:
    return fleet["r"]


@pytest.fixture
def start(folder: Path, model: Path) -> Iterator[Start]:
    """Instances of one test's own: killed at its end, if they still live."""
    started: list[Instance] = []

    def start_one(name: str, role: str | None, **options: Any) -> Instance:
        started.append(Instance(folder, name, options.pop("model", model), role, **options))
        return started[-1]

    yield start_one
    for instance in started:
        instance.kill()
        instance.close()
