"""Which of the requests that a router has had the end of are kept for the next one."""

import numpy as np
import pytest

import crossrail.kv.nodes.told as told_module
from crossrail.kv import messages as m
from crossrail.kv.nodes.serving import Serving
from crossrail.kv.nodes.told import Told
from crossrail.kv.timeline import Timeline
from crossrail.kv.transfer.prefix import NO_NAMES


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now_s = [0.0]
    monkeypatch.setattr(told_module, "loop_time_s", lambda: now_s[0])
    return now_s


def ended(name: str, prompt: int = 0) -> Serving:
    timeline = Timeline(lambda: 0.0)
    return Serving(name, None, b"router", 1, np.zeros(prompt, np.int32), m.Sampling(), timeline, None, NO_NAMES)  # type: ignore[arg-type]


def names(told: Told) -> list[str]:
    return [serving.request for serving in told.latest()]


def test_kept_for_a_time_however_many(clock: list[float]) -> None:
    told = Told(10.0, 1000, 1 << 20)
    for index in range(200):
        clock[0] = index * 0.1
        told.add(ended(str(index)))
    assert names(told) == [str(index) for index in range(100, 200)]
    clock[0] = 28.0
    assert names(told) == [str(index) for index in range(181, 200)]


def test_the_latest_where_there_are_too_many(clock: list[float]) -> None:
    told = Told(10.0, 3, 1 << 20)
    for index in range(5):
        told.add(ended(str(index)))
    assert names(told) == ["2", "3", "4"]


def test_the_latest_where_they_take_too_much(clock: list[float]) -> None:
    told = Told(10.0, 1000, 999)
    for index, prompt in enumerate((100, 100, 100, 50)):
        told.add(ended(str(index), prompt))
    assert names(told) == ["2", "3"]
    told.add(ended("long", 1000))
    assert names(told) == []
    told.add(ended("short", 10))
    assert names(told) == ["short"]
