"""What docs/simulator.md shows runs as it stands there."""

import re
from pathlib import Path
from typing import Any

import pytest

from crossrail.sim.scenarios import Scenario, play
from tests.support.process import REPOSITORY

pytest_plugins = ["pytester"]

TEXT = (Path(REPOSITORY) / "docs" / "simulator.md").read_text()
CONFTEST, TEST, SCRIPT, CHAOS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def test_the_test_of_two_minutes_passes_with_many_seeds(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(test_push=TEST)

    without = ("-p", "no:cacheprovider", "-p", "no:asyncio", "-p", "no:rerunfailures")
    result = pytester.runpytest_inprocess(*without, "--sim-runs", "20")

    result.assert_outcomes(passed=20)


def test_the_scenario_of_ones_own_holds() -> None:
    module: dict[str, Any] = {}
    exec(CHAOS, module)

    for number in range(5):
        assert play(Scenario("slow_start", "", module["slow_start"]), number).failures == []


@pytest.mark.no_sanitizer  # a million works: minutes under one
def test_the_script_moves_its_terabyte(capsys: pytest.CaptureFixture[str]) -> None:
    exec(SCRIPT, {})

    seconds, words = capsys.readouterr().out.split(" ", 1)
    assert words == "virtual seconds\n"
    assert float(seconds) == pytest.approx((1 << 40) * 8 / 364e9, rel=0.1)
