"""What the environment says: crossrail's options, and SGLang's own variables for all of its backends."""

from __future__ import annotations

import json
from typing import Any

import pytest

import crossrail as xr
from crossrail.integrations.sglang.options import SglangOptions

SGLANG = "SGLANG_DISAGGREGATION_"


def read(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], variables: dict[str, str]) -> SglangOptions:
    monkeypatch.setenv("CROSSRAIL_SGLANG_OPTIONS", json.dumps(options))
    for name, value in variables.items():
        monkeypatch.setenv(SGLANG + name, value)
    return SglangOptions.from_environment()


def test_none_has_to_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read(monkeypatch, {}, {}) == SglangOptions()
    assert read(monkeypatch, {}, {"BOOTSTRAP_TIMEOUT": ""}) == SglangOptions()


@pytest.mark.parametrize(
    ("variables", "times"),
    [
        ({"BOOTSTRAP_TIMEOUT": "600"}, {"bootstrap_s": 600.0}),
        ({"WAITING_TIMEOUT": "20"}, {"load_s": 20.0}),
        ({"WAITING_TIMEOUT": "1000000"}, {"load_s": 86400.0}),
        ({"HEARTBEAT_INTERVAL": "4", "HEARTBEAT_MAX_FAILURE": "1"}, {"prefiller_timeout_s": 4.0}),
        ({"HEARTBEAT_MAX_FAILURE": "4"}, {"prefiller_timeout_s": 20.0, "quiesce_s": 60.0}),
        ({"HEARTBEAT_INTERVAL": "0.1"}, {"prefiller_timeout_s": 4.0}),
    ],
)
def test_sglangs_variables_are_obeyed(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], times: dict[str, float]
) -> None:
    """With SGLang's least values, 2 s and one failure. A scheduler waits for as long as that takes."""
    assert read(monkeypatch, {}, variables) == SglangOptions(**times)  # type: ignore[arg-type]


def test_an_option_goes_before_sglangs_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"BOOTSTRAP_TIMEOUT": "600", "WAITING_TIMEOUT": "700"}
    options = read(monkeypatch, {"bootstrap_s": 5.0}, variables)
    assert (options.bootstrap_s, options.load_s) == (5.0, 700.0)


@pytest.mark.parametrize("value", ["soon", "0", "-3", "nan"])
def test_what_is_no_time_is_named(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    with pytest.raises(xr.UsageError, match=f"{SGLANG}WAITING_TIMEOUT='{value}' must be a number above 0"):
        read(monkeypatch, {}, {"WAITING_TIMEOUT": value})


def test_a_scheduler_stands_still_for_as_long_as_a_longer_time_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read(monkeypatch, {"prefiller_timeout_s": 20}, {}).quiesce_s == 60.0
