"""What integrations take from the environment: bytes as they are, and nothing for an empty variable."""

import os
from pathlib import Path

import pytest

from crossrail.errors import UsageError
from crossrail.integrations.secret import shared_secret
from crossrail.integrations.sglang.options import SglangOptions
from crossrail.integrations.vllm.weights_worker import Link


def test_secret_is_any_bytes_as_that_of_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CROSSRAIL_SECRET", os.fsdecode(b"a\xffb"))

    assert shared_secret(None, "this", "options") == Link(b"", 0).secret() == b"a\xffb"


def test_secret_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    for ask in (
        lambda: shared_secret(str(tmp_path / "missing"), "this", "options"),
        Link(b"", 0, secret_file=str(tmp_path / "missing")).secret,
    ):
        with pytest.raises(UsageError, match=r"secret_file: .*missing"):
            ask()


def test_options_of_sglang_that_are_empty_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CROSSRAIL_SGLANG_OPTIONS", "")

    assert SglangOptions.from_environment() == SglangOptions()


@pytest.mark.parametrize("text", ["x", '{"rail": 2}', os.fsdecode(b'{"secret_file": "\xff"}')])
def test_options_of_sglang_that_cannot_be_are_told(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CROSSRAIL_SGLANG_OPTIONS", text)

    with pytest.raises(UsageError, match="CROSSRAIL_SGLANG_OPTIONS="):
        SglangOptions.from_environment()
