"""Where `crossrail serve` leaves its address for other shells, on machines that make it hard."""

import errno
import os
from pathlib import Path

import pytest

import crossrail as xr
from crossrail.cli import rendezvous
from crossrail.errors import CrossrailError


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "crossrail"


@pytest.mark.parametrize("call", ["write", "link"])
def test_directory_that_is_full_is_named(
    names: Path, engine: xr.Engine, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(rendezvous.os, call, fail)

    with pytest.raises(CrossrailError) as caught:
        rendezvous.publish(None, engine.address)

    assert f"cannot leave the address of this serve in {names}: No space left on device" in str(caught.value)
    assert "XDG_RUNTIME_DIR" in str(caught.value)
    assert os.listdir(names) == []


def test_serve_is_found_where_the_host_hides_who_it_is(
    names: Path, engine: xr.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hide(path: Path) -> str:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))

    monkeypatch.setattr(Path, "read_text", hide)

    with rendezvous.publish(None, engine.address) as published:
        assert rendezvous.resolve(f"{published.name}:") == (engine.address, "")


def test_file_that_no_serve_holds_is_told_by_its_path(tmp_path: Path) -> None:
    (tmp_path / "left.serve").write_text("{}")
    with pytest.raises(CrossrailError, match=rf"no crossrail serve holds {tmp_path}/left.serve: it has ended"):
        rendezvous.resolve(f"{tmp_path}/left.serve:")
