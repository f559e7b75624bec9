"""SGLang's own base classes where it is installed, as ./dev sglang does; else a stand-in with their names."""

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

if importlib.util.find_spec("sglang") is None:
    sys.path.insert(0, str(Path(__file__).with_name("stand_in")))
    collect_ignore = ["test_interface.py", "test_servers.py"]

from tests.sglang.side import PATIENT, SECRET, Side
from tests.support.ports import free_port

Open = Callable[..., Side]
STAND_IN = Path(__file__).with_name("stand_in") / "sglang" / "srt"


def stand_in(name: str) -> ModuleType:
    """A module of the stand-in, whether or not SGLang's own is there."""
    spec = importlib.util.spec_from_file_location(f"stand_in.{name}", STAND_IN / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CROSSRAIL_SECRET", SECRET)
    monkeypatch.setenv("CROSSRAIL_SGLANG_OPTIONS", json.dumps(PATIENT))


@pytest.fixture
def address() -> str:
    return f"127.0.0.1:{free_port()}"


@pytest.fixture
def serving() -> Any:
    """The prefill server's flags."""
    return SimpleNamespace(host="127.0.0.1", port=1, ssl_certfile=None, api_key=None)


@pytest.fixture
def server(address: str, serving: Any, nothing_leaks: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    from crossrail.integrations.sglang import CrossrailKVBootstrapServer, conn

    monkeypatch.setattr(conn, "get_serving", lambda: serving)
    host, _, port = address.partition(":")
    running = CrossrailKVBootstrapServer(host, int(port))
    yield running
    running.close()


@pytest.fixture
def open_side(server: Any, address: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    opened: list[Side] = []

    def open_one(mode: str, **options: Any) -> Side:
        changes = options.pop("options", {})
        monkeypatch.setenv("CROSSRAIL_SGLANG_OPTIONS", json.dumps(PATIENT | changes))
        opened.append(Side(mode, address, **options))
        return opened[-1]

    yield open_one
    for side in reversed(opened):
        side.close()


@pytest.fixture
def p(open_side: Open) -> Side:
    return open_side("prefill")


@pytest.fixture
def d(open_side: Open) -> Side:
    return open_side("decode")
