"""Errors go to other processes as they are: pools of processes, Ray and pytest-xdist pickle what is raised."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest

import crossrail as xr
import crossrail.kv
import crossrail.moe
import crossrail.weights

PACKAGES = (xr, crossrail.kv, crossrail.moe, crossrail.weights)
OF_THEIR_OWN = {
    "CapacityExceeded": lambda kind: kind("too many", rank=3, needed=5, there=4),
    "LateWrite": lambda kind: kind("region 7", 8, 16, b"\x01\x02", 2),
    "NoPages": lambda kind: kind("request-1", "none is free", 4, 0),
    "NotFinite": lambda kind: kind("layer.0", (1, 2), 0.5),
    "PeerFailed": lambda kind: kind("a call failed", rank=3, has_left=False),
    "TransportError": lambda kind: kind("bind", 98, "in use", "another port"),
    "UpdateFailed": lambda kind: kind(7, "a rank is gone", asked_for=8),
    "WaitTimeout": lambda kind: kind("late", 1, 2),
    "WatermarkTooSmall": lambda kind: kind("layer.0", 10, 5),
}
ERRORS = sorted(
    {
        each
        for package in PACKAGES
        for each in (getattr(package, name) for name in package.__all__)
        if inspect.isclass(each) and issubclass(each, xr.CrossrailError)
    },
    key=lambda kind: kind.error_code,
)


def made(kind: type[xr.CrossrailError]) -> xr.CrossrailError:
    if kind.__name__ in OF_THEIR_OWN:
        error: xr.CrossrailError = OF_THEIR_OWN[kind.__name__](kind)
    elif issubclass(kind, xr.TransferError):
        error = kind("failed", op="write", peer="b", nbytes=8, imm=1, status="peer-lost", region=65536, offset=4)
    else:
        error = kind("words")
    error.__notes__ = ["of its user"]
    return error


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.error_code)
def test_pickles_and_copies_of_errors_are_as_they_were(kind: type[xr.CrossrailError]) -> None:
    error = made(kind)

    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(other) is kind
        assert (str(other), other.args, vars(other)) == (str(error), error.args, vars(error))


def test_error_of_a_user_that_extends_ours_survives_too() -> None:
    error = _Mine(17, "blue")

    other = pickle.loads(pickle.dumps(error))

    assert (str(other), other.shade, other.error_code) == ("17 of blue", "blue", "usage-error")


class _Mine(xr.UsageError):
    def __init__(self, number: int, shade: str) -> None:
        super().__init__(f"{number} of {shade}")
        self.shade = shade
