"""verl's own base class where it is installed, as ./dev verl does; else a stand-in with its names."""

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("verl") is None:
    sys.path.insert(0, str(Path(__file__).with_name("stand_in")))
    collect_ignore = ["test_torch_manager.py"]

SECRET = "the secret of verl's tests"


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CROSSRAIL_SECRET", SECRET)


@pytest.fixture
def make(nothing_leaks: None) -> Iterator[Callable[..., Any]]:
    """Makes checkpoint engines as verl does: by the registry, with its bucket size, and these of engine_kwargs."""
    from verl.checkpoint_engine import CheckpointEngineRegistry

    import crossrail.integrations.verl  # noqa: F401 (registers it, as custom_backend_module does)

    made: list[Any] = []

    def make_one(bucket_bytes: int = 1 << 20, **options: Any) -> Any:
        engine = CheckpointEngineRegistry.new(
            "crossrail", bucket_size=bucket_bytes, **{"transport": "shm", "device": "cpu", "timeout_s": 20.0, **options}
        )
        made.append(engine)
        return engine

    yield make_one
    for engine in made:
        engine.finalize()
        engine._engine.close()
